"""Something to hook."""


class Target:
    def method(self, value: int) -> int:
        return value
