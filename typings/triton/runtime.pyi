class _Utils:
    def get_device_properties(self, device: int, /) -> dict[str, int]: ...

class _Driver:
    utils: _Utils

class _Config:
    active: _Driver

driver: _Config
