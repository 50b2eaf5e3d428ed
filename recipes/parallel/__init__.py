"""One recipe in one process or many: what is asked for, how it is started, and that it is in force.

`strategy` reads what is asked for, `limits` refuses what it cannot do, `launch` starts processes, `world` joins them.
Around the trainer, `in_force` stops a run that is not what was asked for, `order` gives the same rows whatever the
number of processes, `checkpoints` resumes those of any strategy, `tensor` splits the weights for tensor parallelism,
`zero` is what a run asks of DeepSpeed, and `whole` puts a sharded model together again.
"""
