"""The benchmarks as one command: `python -m benchmarks NAME ...`; without a name it lists them."""

import sys

from jobs.command_line import sub_commands

COMMANDS = {
    "decoders": ("benchmarks.commands:decoders", "every decoder beside a plain loop of the same method"),
    "engine": ("benchmarks.commands:engine", "a decode step beside its bare forward and the machine's roofline"),
    "forward": ("benchmarks.commands:forward", "an autoregressive model's forward beside transformers' own"),
    "buffer": ("benchmarks.commands:buffer", "buffer sizes and block budgets at 1 to 64 requests at once"),
    "modes": ("benchmarks.commands:modes", "drafts, single tokens and the choice by load at 1 to 64 requests at once"),
    "capacity": (
        "benchmarks.capacity.commands:capacity",
        "the replicas, batch and memory that a load needs, computed",
    ),
    "arrivals": (
        "benchmarks.capacity.commands:arrivals",
        "arrivals on 1 to 1,000 simulated replicas, real schedulers",
    ),
    "beyond": (
        "benchmarks.capacity.commands:beyond",
        "pages in the host's memory, and prompts stored elsewhere, computed",
    ),
    "agreement": ("benchmarks.capacity.commands:agreement", "such a simulation beside the real engine on this CPU"),
    "train": ("benchmarks.commands:train", "MultiTF's shared clean stream beside a sequence for each layout"),
    "context": ("benchmarks.context.commands:context", "long prompts: storing, host work by depth, gaps in streams"),
    "turns": ("benchmarks.context.commands:turns", "a conversation's next turn beside a cold start"),
    "affinity": ("benchmarks.context.commands:affinity", "turns over replicas: prefixes found, by who routes them"),
    "agent": (
        "benchmarks.load.agent",
        "an agent's session of fifty turns: prefixes found, and the time to first tokens",
    ),
    "replay": ("benchmarks.replay:replay", "what a learner pays for a rollout, and how far it is from the engine"),
    "rounding": ("benchmarks.commands:rounding", "the error of a model's logits with FP8 or int8 weights"),
    "remote": ("benchmarks.remote_weights:remote", "weights at a URL: downloaded and loaded, or read by range"),
    "sweep": ("benchmarks.evaluation:sweep", "a sweep on Ray beside the engine called directly"),
    "sandbox": ("benchmarks.evaluation:sandbox", "what the sandbox costs a program that does nothing"),
    "graders": ("benchmarks.graders:graders", "wrong verdicts on right and wrong answers, beside math-verify alone"),
    "serve": ("benchmarks.load.serve", "an endpoint under load, beside its engine alone"),
    "bystander": ("benchmarks.load.bystander", "a short request's latency while a crowd attacks"),
    "soak": ("benchmarks.load.soak", "load, kills and bad requests for minutes: what was lost"),
}

main = sub_commands("python -m benchmarks", COMMANDS)

if __name__ == "__main__":
    sys.exit(main())
