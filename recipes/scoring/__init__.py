"""What a model is worth on data that it was not trained on.

`score` is one figure with its interval, `intervals` are how sure it is. `subject` opens the model, `rows` reads the
data, `kinds` lists the kinds of metrics, each in a file of its own; `run` puts all together, `results` writes it down.
"""
