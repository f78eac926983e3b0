"""A model as a proven chain of layers: where it may be cut, and whose parameter is whose."""

from __future__ import annotations

from edgesplit.splitting.chain import (
    Chain,
    Layer,
    Value,
    build_chain,
    checked,
    fingerprint,
    layer_buffers,
    layer_params,
    load_weights,
    random_names,
    weights_of,
)
from edgesplit.splitting.cuts import batch_norm_layers, check_cuts, modes_kept, set_train
from edgesplit.splitting.proof import prove_chain

__all__ = [
    "Chain",
    "Layer",
    "Value",
    "batch_norm_layers",
    "build_chain",
    "check_cuts",
    "checked",
    "fingerprint",
    "layer_buffers",
    "layer_params",
    "load_weights",
    "modes_kept",
    "prove_chain",
    "random_names",
    "set_train",
    "weights_of",
]
