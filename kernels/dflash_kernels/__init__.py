"""Device ops of the DFlash step. Each op is a folder: the public op, and its torch reference."""
