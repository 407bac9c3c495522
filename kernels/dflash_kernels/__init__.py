"""Device ops of the DFlash step.

Each op is a folder: the public op, which chooses by the tensors' device, its torch reference, and
its Triton twin in `kernel.py`, which is imported when the first CUDA tensor arrives.
"""
