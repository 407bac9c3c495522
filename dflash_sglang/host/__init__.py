"""The part that knows SGLang: worker, drafting, verification, context KV and the contract with the host."""
