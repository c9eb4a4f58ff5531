"""D2F's training states in blocks of 4, as its released code draws them."""

from mbd_core.multitf.states.layout import StateConfig
from mbd_core.multitf.states.noise import NoiseBounds

D2F_STATES = StateConfig(
    block_size=4,
    layouts="d2f",
    schedule="d2f_monotonic",
    bounds=NoiseBounds(t_low=0.2, t_high=0.7, margin=0.0),
    rounding="bernoulli",
    weighting="ratio_mean",
)
