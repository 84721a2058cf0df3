"""Run by test_gather_triton.py: compiles the kernels for a Hopper GPU, which needs none. The
interpreter takes what the compiler refuses. Prints how many forms it compiled."""

from __future__ import annotations

import sys
from itertools import product

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found, import-untyped, unused-ignore]
from triton.compiler import ASTSource  # type: ignore[import-not-found, import-untyped, unused-ignore]

from kv_transfer import digest_triton
from kv_transfer import gather_triton as kernel
from kv_transfer.device import digest

# 32 layers, K and V, blocks of 16 tokens, 8 heads of 128 channels; unit strides count elements.
LAYOUT = (32, 2, 16, 128, 1024, kernel.TILE_TOKENS, kernel.MAX_TILE_ROW)
STRIDES = (2 * 16 * 1024, 16 * 1024, 1024, 128)


def main() -> int:
    forms = list(product(("*i8", "*i16", "*i32", "*i64"), (False, True)))
    for wire, is_scatter in forms:
        shape = (*LAYOUT, *STRIDES, is_scatter)
        signature = {
            "words": "*i64",
            "wire": wire,
            "first_token": "i32",
            "num_tokens": "i32",
            "SHAPE": ("constexpr",) * len(shape),
        }
        constants = {(4, n): value for n, value in enumerate(shape)}
        source = ASTSource(fn=kernel._move, signature=signature, constexprs=constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
        assert compiled.asm["cubin"]
    for element in digest_triton.ELEMENTS.values():
        shape = (*LAYOUT, *STRIDES, digest.STEP, digest.FIRST, digest.SECOND, element)
        signature = {
            "words": "*i64",
            "sums": "*i64",
            "first_token": "i32",
            "num_tokens": "i32",
            "SHAPE": ("constexpr",) * len(shape),
        }
        constants = {(4, n): value for n, value in enumerate(shape)}
        source = ASTSource(fn=digest_triton._sum, signature=signature, constexprs=constants)
        assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
    sys.stdout.write(f"compiled {len(forms) + 4}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
