"""The method, without SGLang: accept rules, penalties along a block, the choice of a width."""
