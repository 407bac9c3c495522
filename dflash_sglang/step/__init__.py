"""The part that knows SGLang: worker, draft, verify, context KV, and the contract with it."""
