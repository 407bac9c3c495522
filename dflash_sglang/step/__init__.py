"""The speculative worker: one step of SGLang's scheduler, in reading order from `worker.py`.

`setup/` holds what runs once, before the first step.
"""
