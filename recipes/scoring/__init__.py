"""What a model is worth on data that it was not trained on.

`score` is one figure with its interval, `intervals` are how sure it is.
"""
