"""The shuffles told once more, by where each element goes. Written without a look at the permutations, which tests compare with it.

Every function returns, for row ``n`` and column ``k`` of one expert (or of the whole array of scales), the flat position in the shuffled array.
"""


def tile_position(n: int, k: int, columns: int, *, vector: int) -> int:
    """Where shuffle_weight with (16, 16) puts an element: tiles of 16 rows and 32 columns, in them vectors down the rows, then across."""
    tile = (n // 16) * (columns // 32) + k // 32
    vector_of_tile = ((k % 32) // vector) * 16 + n % 16
    return tile * 16 * 32 + vector_of_tile * vector + k % vector


def lane_position(n: int, k: int, rows: int, columns: int, *, gate_up: bool) -> int:
    """Where shuffle_weight_a16w4 with 16 lanes puts an element: blocks of 16 rows and 64 columns, those of gate and up side by side in a row."""
    half, row = divmod(n, rows // 2) if gate_up else (0, n)
    bands = 2 if gate_up else 1
    band = (row // 16) * bands + half
    block = band * (columns // 64) + k // 64
    return block * 16 * 64 + ((k % 64) // 16) * 16 * 16 + (row % 16) * 16 + k % 16


def scale_tile_position(x: int, y: int, columns: int) -> int:
    """Where e8m0_shuffle puts a byte; ``columns`` is the padded width. The contract's own formula."""
    return (x // 32) * 32 * columns + (y // 8) * 256 + (y % 4) * 64 + (x % 16) * 4 + ((y % 8) // 4) * 2 + (x % 32) // 16


def scale_lane_position(n: int, k: int, rows: int, columns: int, *, gate_up: bool) -> int:
    """Where shuffle_scale_a16w4 puts a byte of one expert: dwords of two row groups (or gate and up) by two columns four apart."""
    if gate_up:
        low, row = divmod(n, rows // 2)
        tall, lane = divmod(row, 16)
    else:
        tall, row = divmod(n, 32)
        low, lane = divmod(row, 16)
    block = tall * (columns // 8) + k // 8
    return block * 256 + (k % 4) * 64 + lane * 4 + ((k % 8) // 4) * 2 + low
