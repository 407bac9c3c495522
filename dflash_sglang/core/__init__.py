"""The method itself, in plain torch: nothing here knows SGLang."""
