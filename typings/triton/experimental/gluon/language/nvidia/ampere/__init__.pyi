from . import async_copy as async_copy
