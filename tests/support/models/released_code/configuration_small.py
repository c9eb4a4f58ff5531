"""Configurations as a release's folder has them: each family's keys under their own names."""

from transformers import PretrainedConfig


class SDARConfig(PretrainedConfig):
    model_type = "sdar"


class SDARMoeConfig(PretrainedConfig):
    model_type = "sdar_moe"


class LLaDA2MoeConfig(PretrainedConfig):
    model_type = "llada2_moe"


class LLaDAConfig(PretrainedConfig):
    model_type = "llada"


class DreamConfig(PretrainedConfig):
    model_type = "Dream"
