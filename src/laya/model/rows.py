"""What stands in the rows of a step's products, for linears whose sums depend on a product's shape.

Made by the eager forward pass, read by `quant.py`. A product of a fixed shape gives a row the same bits wherever it stands and
whatever stands beside it (held by tests/model/test_seeded.py). So rows that are promised their bits are multiplied in shapes
that follow from their own sequence: decodes in blocks of `BLOCK`, each piece of a prompt alone. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# Decodes multiplied together: as many as run by default. A lone bf16 row takes 0.11 ms (960 x 576), four 0.14, eight 0.21.
BLOCK = 4


class Rows:
    """Decodes, then prompt rows that may be multiplied in any way, then pieces [first, last) that stand alone.

    `exact`: a decode or a piece of this step is promised its bits.
    """

    __slots__ = ("decodes", "free", "pieces", "exact")

    def __init__(self, decodes: int = 0, free: int = 0, pieces: tuple[tuple[int, int], ...] = (), exact: bool = False) -> None:
        self.decodes, self.free, self.pieces, self.exact = decodes, free, pieces, exact

    def long(self, least: int) -> list[tuple[int, int]]:
        """Spans of at least so many rows, decodes left out."""
        spans = [(self.decodes, self.decodes + self.free), *self.pieces]
        return [(first, last) for first, last in spans if last - first >= least]


ALL_FREE = Rows()


def product_apart(x: torch.Tensor, rows: Rows, product: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`product` of all rows, in the shapes that `rows` asks for."""
    parts = [product_in_blocks(x[: rows.decodes], product)] if rows.decodes else []
    spans = [(rows.decodes, rows.decodes + rows.free)] if rows.free else []
    parts += [product(x[first:last].clone()) for first, last in (*spans, *rows.pieces)]  # a clone starts at a cache line
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def product_in_blocks(x: torch.Tensor, product: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`product` of rows, always `BLOCK` at once: the last block is filled with zeros."""
    count = len(x)
    padded = x.new_zeros((-(-count // BLOCK) * BLOCK, x.shape[1]))
    padded[:count] = x
    return torch.cat([product(block.clone()) for block in padded.split(BLOCK)])[:count]
