"""Twenty policies that are wrong: some tile of the last stage waits for what is never posted."""

from tilewright.tilesync import (
    Conv2d,
    Conv2DSync,
    Gemm,
    Graph,
    GroupSync,
    Reduction,
    RowSync,
    SplitKSync,
    StageSync,
    StridedSync,
    TileSync,
)

ROWS, INNER, COLUMNS = 3, 6, 2  # tiles


def mlp(sync):
    """Of 3 x 6 tiles, then 3 x 2."""
    m, n, k = 8 * ROWS, 16 * INNER, 16
    up = Gemm("h", "x", "w", (m, n, k), tile=(8, 16))
    down = Gemm("y", "h", "v", (m, 16 * COLUMNS, n), tile=(8, 16), sync={"h": sync})
    return Graph({"x": (m, k), "w": (n, k), "v": (16 * COLUMNS, n)}, [up, down], ["y"])


def split(sync):
    """Three splits of 2 x 2 tiles, and their sum."""
    parts = Gemm("h", "x", "w", (16, 32, 192), tile=(8, 16), splits=3)
    whole = Reduction("y", "h", (16, 32), splits=3, tile=(8, 16), like="x", sync={"h": sync})
    return Graph({"x": (16, 192), "w": (32, 192)}, [parts, whole], ["y"])


def convolution(sync):
    sizes = {"images": 1, "height": 8, "width": 8, "channels": (8, 8), "tile": (16, 8)}
    return Graph(
        {"x": (64, 8), "w": (8, 3, 3, 8), "v": (8, 3, 3, 8)},
        [Conv2d("h", "x", "w", **sizes), Conv2d("y", "h", "v", sync={"h": sync}, **sizes)],
        ["y"],
    )


def policy(base, *fields, **methods):
    """A policy of the base's name with other methods, each of which is given what the base's returns first."""

    def method(name, change):
        return lambda self, *asked: change(getattr(base, name)(self, *asked), *asked)

    changed = {name: method(name, change) for name, change in methods.items()}
    return type(f"Wrong{base.__name__}", (base,), changed)(*fields)


def waits(change):
    """The value of each wait is another one, which may depend on the tile."""
    return lambda found, edge, tile: [(name, change(value, tile)) for name, value in found]


def wait_for(count):
    return lambda found, edge, tile: [(name, count) for name, _ in found]


def silent(which):
    """Some tiles post nothing."""
    return lambda amount, edge, tile: 0 if which(tile) else amount


more = waits(lambda value, tile: value + 1)
WRONG = {
    "one too many of a row": mlp(policy(RowSync, waits=more)),
    "one too many of a tile": mlp(policy(TileSync, waits=more)),
    "one too many of a stage": mlp(policy(StageSync, waits=more)),
    "one too many of a stride": mlp(policy(StridedSync, 2, waits=more)),
    "twice as many of a group": mlp(policy(GroupSync, 3, waits=waits(lambda value, tile: 2 * value))),
    "all of the stage at a row": mlp(policy(RowSync, waits=wait_for(ROWS * INNER))),
    "rows and columns mixed up": mlp(policy(StridedSync, 3, waits=wait_for(ROWS))),
    "a million": mlp(policy(RowSync, waits=wait_for(2**20))),
    "the last row alone": mlp(policy(RowSync, waits=waits(lambda value, tile: value + (tile[0] == ROWS - 1)))),
    "one tile alone": mlp(policy(TileSync, waits=waits(lambda value, tile: value + (tile == (1, 1))))),
    "each row adds to the one before": mlp(policy(RowSync, waits=waits(lambda value, tile: value * (tile[0] + 1)))),
    "the last column is silent": mlp(
        policy(RowSync, posts=silent(lambda tile: tile[1] == INNER - 1), waits=wait_for(INNER))
    ),
    "the first tile is silent": mlp(
        policy(StageSync, posts=silent(lambda tile: tile == (0, 0)), waits=wait_for(ROWS * INNER))
    ),
    "every other column is silent": mlp(
        policy(RowSync, posts=silent(lambda tile: tile[1] % 2), waits=wait_for(INNER))
    ),
    "the first column alone posts": mlp(
        policy(RowSync, posts=silent(lambda tile: tile[1]), waits=wait_for(INNER))
    ),
    "posted to another row's": mlp(
        policy(RowSync, semaphore=lambda row, edge, tile: row if tile[1] else (row + 1) % ROWS if row else 0,
               waits=lambda found, edge, tile: [(tile[0], INNER)])
    ),
    "a split too many": split(policy(SplitKSync, waits=more)),
    "the first split alone posts": split(
        policy(SplitKSync, posts=silent(lambda tile: tile[0]), waits=wait_for(3))
    ),
    "the halo counted twice": convolution(policy(Conv2DSync, waits=waits(lambda value, tile: value + 1))),
    "pixels counted as channels": convolution(policy(Conv2DSync, waits=wait_for(4))),
}  # fmt: skip
