"""Products of 64 rows and a tile of weights, by one warpgroup.

Each step along the depth waits until its stage is full, and says when it is empty. For fp8, a step is one group of scales: its product is added,
scaled, to what is in registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def whole(
    a_bufs: gl.tensor,
    b_bufs: gl.tensor,
    full: gl.tensor,
    empty: gl.tensor,
    it: gl.tensor,
    W: gl.constexpr,
    UP: gl.constexpr,
    STEP: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:
    """Multiply 64 rows by a tile of 16-bit weights. Return (gate, up), or its left and its right half."""
    WIDE: gl.constexpr = b_bufs.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    acc = gl.zeros([64, WIDE], gl.float32, layout)
    for k in range(STEPS):
        s = (it + k) % STAGES
        mbarrier.wait(full.index(s), ((it + k) // STAGES) & 1)
        if UP:
            fence_async_shared()
        acc = warpgroup_mma(a_bufs.index(2 * s + W), b_bufs.index(s).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(empty.index((it + k + STAGES - 1) % STAGES), count=1, pred=k > 0)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((it + STEPS - 1) % STAGES), count=1)
    if STEP == 1:
        left, right = gl.split(acc.reshape([64, 2, WIDE // 2]).permute([0, 2, 1]))
    else:
        left, right = gl.split(acc.reshape([64, WIDE // 2, 2]))
    return left, right


@gluon.jit
def narrow(
    a_bufs: gl.tensor,
    b_bufs: gl.tensor,
    full: gl.tensor,
    empty: gl.tensor,
    it: gl.tensor,
    one: gl.constexpr,
    other: gl.constexpr,
    UP: gl.constexpr,
    STEP: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:
    """Multiply 64 rows, the only ones, by two quarters of a tile of 16-bit weights. Return as whole does."""
    QUARTER: gl.constexpr = b_bufs.shape[1] // 4
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUARTER, 16])
    left = gl.zeros([64, QUARTER], gl.float32, layout)
    right = gl.zeros([64, QUARTER], gl.float32, layout)
    for k in range(STEPS):
        s = (it + k) % STAGES
        mbarrier.wait(full.index(s), ((it + k) // STAGES) & 1)
        if UP:
            fence_async_shared()
        a = a_bufs.index(2 * s)
        b = b_bufs.index(s)
        left = warpgroup_mma(a, b.slice(one * QUARTER, QUARTER).permute((1, 0)), left, is_async=True)
        right = warpgroup_mma(a, b.slice(other * QUARTER, QUARTER).permute((1, 0)), right, is_async=True)
        left, right = warpgroup_mma_wait(2, deps=(left, right))
        mbarrier.arrive(empty.index((it + k + STAGES - 1) % STAGES), count=1, pred=k > 0)
    left, right = warpgroup_mma_wait(0, deps=(left, right))
    mbarrier.arrive(empty.index((it + STEPS - 1) % STAGES), count=1)
    if STEP == 2:
        left, right = gl.split(gl.join(left, right).permute([0, 2, 1]).reshape([64, QUARTER, 2]))
    return left, right


@gluon.jit
def whole_scaled(
    a_bufs: gl.tensor,
    b_bufs: gl.tensor,
    full: gl.tensor,
    empty: gl.tensor,
    it: gl.tensor,
    a_scale: gl.tensor,
    b_scale: gl.tensor,
    APART: gl.constexpr,
    W: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:
    """Multiply 64 rows by a tile of fp8 weights of the first product. Scales are loaded two steps ahead."""
    HALF: gl.constexpr = b_bufs.shape[1] // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 32])
    left = gl.zeros([64, HALF], gl.float32, layout)
    right = gl.zeros([64, HALF], gl.float32, layout)
    part = gl.zeros([64, HALF], gl.float32, layout)
    by = gl.load(a_scale)
    left_by = by * gl.load(b_scale)
    right_by = by * gl.load(b_scale + APART)
    by = gl.load(a_scale + 1, mask=STEPS > 1, other=0.0)
    by_l = gl.load(b_scale + 1, mask=STEPS > 1, other=0.0)
    by_r = gl.load(b_scale + (APART + 1), mask=STEPS > 1, other=0.0)
    for k in range(STEPS):
        s = (it + k) % STAGES
        mbarrier.wait(full.index(s), ((it + k) // STAGES) & 1)
        fence_async_shared()
        ahead = k + 2 < STEPS  # what is loaded in this step is multiplied at the end of the next
        next_by = gl.load(a_scale + (k + 2), mask=ahead, other=0.0)
        next_l = gl.load(b_scale + (k + 2), mask=ahead, other=0.0)
        next_r = gl.load(b_scale + (k + APART + 2), mask=ahead, other=0.0)
        a = a_bufs.index(2 * s + W)
        b = b_bufs.index(s)
        part = warpgroup_mma(a, b.slice(0, HALF).permute((1, 0)), part, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(0, deps=(part,))
        left += part * left_by[:, None]
        left, part = _after(left, part)
        part = warpgroup_mma(a, b.slice(HALF, HALF).permute((1, 0)), part, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(0, deps=(part,))
        mbarrier.arrive(empty.index(s), count=1)
        right += part * right_by[:, None]
        left_by = by * by_l
        right_by = by * by_r
        by = next_by
        by_l = next_l
        by_r = next_r
    return left, right


@gluon.jit
def _after(total: gl.tensor, part: gl.tensor) -> tuple[gl.tensor, gl.tensor]:
    """Return both; whatever overwrites ``part`` comes after ``total`` is made of it, so that the compiler needs no copy."""
    return gl.inline_asm_elementwise("// $0 $1", "=f,=f,0,1", [total, part], dtype=(gl.float32, gl.float32), is_pure=True, pack=1)


@gluon.jit
def whole_overlapped(
    a_bufs: gl.tensor,
    b_bufs: gl.tensor,
    full: gl.tensor,
    empty: gl.tensor,
    it: gl.tensor,
    a_scale: gl.tensor,
    a_stride: gl.tensor,
    b_scale: gl.tensor,
    APART: gl.constexpr,
    W: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:
    """Multiply 64 rows by a tile of fp8 weights of the second product: while one quarter is added, the next one is multiplied."""
    QUARTER: gl.constexpr = b_bufs.shape[1] // 4
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUARTER, 32])
    sum_0 = gl.zeros([64, QUARTER], gl.float32, layout)
    sum_1 = gl.zeros([64, QUARTER], gl.float32, layout)
    sum_2 = gl.zeros([64, QUARTER], gl.float32, layout)
    sum_3 = gl.zeros([64, QUARTER], gl.float32, layout)
    even = gl.zeros([64, QUARTER], gl.float32, layout)
    odd = gl.zeros([64, QUARTER], gl.float32, layout)
    by = gl.load(a_scale)
    left_by = by * gl.load(b_scale)
    right_by = by * gl.load(b_scale + APART)
    for k in range(STEPS):
        s = (it + k) % STAGES
        mbarrier.wait(full.index(s), ((it + k) // STAGES) & 1)
        a = a_bufs.index(2 * s + W)
        b = b_bufs.index(s)
        even = warpgroup_mma(a, b.slice(0, QUARTER).permute((1, 0)), even, use_acc=False, is_async=True)
        odd = warpgroup_mma(a, b.slice(1 * QUARTER, QUARTER).permute((1, 0)), odd, use_acc=False, is_async=True)
        ahead = k + 1 < STEPS
        a_scale += a_stride
        by = gl.load(a_scale, mask=ahead, other=0.0)
        by_l = gl.load(b_scale + (k + 1), mask=ahead, other=0.0)
        by_r = gl.load(b_scale + (k + APART + 1), mask=ahead, other=0.0)
        even = warpgroup_mma_wait(1, deps=(even,))
        sum_0 += even * left_by[:, None]
        sum_0, even = _after(sum_0, even)
        even = warpgroup_mma(a, b.slice(2 * QUARTER, QUARTER).permute((1, 0)), even, use_acc=False, is_async=True)
        odd = warpgroup_mma_wait(1, deps=(odd,))
        sum_1 += odd * left_by[:, None]
        sum_1, odd = _after(sum_1, odd)
        odd = warpgroup_mma(a, b.slice(3 * QUARTER, QUARTER).permute((1, 0)), odd, use_acc=False, is_async=True)
        even = warpgroup_mma_wait(1, deps=(even,))
        sum_2 += even * right_by[:, None]
        odd = warpgroup_mma_wait(0, deps=(odd,))
        mbarrier.arrive(empty.index(s), count=1)
        sum_3 += odd * right_by[:, None]
        left_by = by * by_l
        right_by = by * by_r
    left = gl.join(sum_0, sum_1).permute([0, 2, 1]).reshape([64, 2 * QUARTER])
    right = gl.join(sum_2, sum_3).permute([0, 2, 1]).reshape([64, 2 * QUARTER])
    return left, right


@gluon.jit
def narrow_scaled(
    a_bufs: gl.tensor,
    b_bufs: gl.tensor,
    full: gl.tensor,
    empty: gl.tensor,
    it: gl.tensor,
    one: gl.constexpr,
    other: gl.constexpr,
    a_scale: gl.tensor,
    a_stride: gl.tensor,
    b_scale: gl.tensor,
    APART: gl.constexpr,
    UP: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:
    """Multiply 64 rows, the only ones, by two quarters of a tile of fp8 weights."""
    QUARTER: gl.constexpr = b_bufs.shape[1] // 4
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUARTER, 32])
    left = gl.zeros([64, QUARTER], gl.float32, layout)
    right = gl.zeros([64, QUARTER], gl.float32, layout)
    part_l = gl.zeros([64, QUARTER], gl.float32, layout)
    part_r = gl.zeros([64, QUARTER], gl.float32, layout)
    by = gl.load(a_scale)
    left_by = by * gl.load(b_scale)
    right_by = by * gl.load(b_scale + APART)
    for k in range(STEPS):
        s = (it + k) % STAGES
        mbarrier.wait(full.index(s), ((it + k) // STAGES) & 1)
        if UP:
            fence_async_shared()
        a = a_bufs.index(2 * s)
        b = b_bufs.index(s)
        part_l = warpgroup_mma(a, b.slice(one * QUARTER, QUARTER).permute((1, 0)), part_l, use_acc=False, is_async=True)
        part_r = warpgroup_mma(a, b.slice(other * QUARTER, QUARTER).permute((1, 0)), part_r, use_acc=False, is_async=True)
        ahead = k + 1 < STEPS
        a_scale += a_stride
        by = gl.load(a_scale, mask=ahead, other=0.0)
        by_l = gl.load(b_scale + (k + 1), mask=ahead, other=0.0)
        by_r = gl.load(b_scale + (k + APART + 1), mask=ahead, other=0.0)
        part_l = warpgroup_mma_wait(1, deps=(part_l,))
        left += part_l * left_by[:, None]
        part_r = warpgroup_mma_wait(0, deps=(part_r,))
        mbarrier.arrive(empty.index(s), count=1)
        right += part_r * right_by[:, None]
        left_by = by * by_l
        right_by = by * by_r
    return left, right
