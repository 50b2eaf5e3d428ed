"""Cache layers of the one layer type that the library does not know: importing this file registers them."""

from transformers.cache_utils import DynamicLayer, StaticLayer


class DynamicGlobalSlidingLayer(DynamicLayer):
    """Keeps every token: those outside the window may be global."""

    _layer_type = "global_sliding_attention"


class StaticGlobalSlidingLayer(StaticLayer):
    """As above, of a fixed length."""

    _layer_type = "global_sliding_attention"
