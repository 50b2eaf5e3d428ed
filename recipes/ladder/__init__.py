"""What each part of an architecture buys: rungs of a pipeline that differ in one part, with the same data and budget.

`rungs` reads which part each rung changes and checks that nothing else differs, `measure` takes the figures of all
rungs side by side, `table` shows them, and `run` puts it together.
"""
