"""The functions of NVIDIA's libdevice, computed on the host for Triton's interpreter.

Triton declares each function with the types of its arguments and result; only the values are
computed here, in float64 and then rounded. So a function of an element does not depend on the
element's place in a block, as those of vectorized float32 libraries may.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Function = Callable[..., Any]


def _torch(function: Callable[[torch.Tensor], torch.Tensor]) -> Function:
    """Return a function of arrays that is computed by torch."""
    return lambda x: function(torch.from_numpy(np.ascontiguousarray(x))).numpy()


def _ilogb(x: np.ndarray) -> np.ndarray:
    """Return the exponent of the leading bit; NVIDIA's results for zero, infinity and NaN."""
    exponent = np.frexp(x)[1] - 1
    largest, smallest = 2**31 - 1, -(2**31)
    return np.where(np.isinf(x), largest, np.where((x == 0) | np.isnan(x), smallest, exponent))


def _lgamma(x: np.ndarray) -> np.ndarray:
    return torch.lgamma(torch.from_numpy(np.ascontiguousarray(x))).numpy()


def _tgamma(x: np.ndarray) -> np.ndarray:
    """Return the gamma function, with the sign that `lgamma` lacks."""
    negative = (x < 0) & (np.floor(x) % 2 != 0)
    return np.where(negative, -1.0, 1.0) * np.exp(_lgamma(x))


def _fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Return x · y + z, exact before its rounding to float32: a product of two fits float64."""
    return x * y + z


def _round(x: np.ndarray) -> np.ndarray:
    """Round halves away from zero."""
    return np.copysign(np.floor(np.abs(x) + 0.5), x)


SQRT_HALF = math.sqrt(0.5)

FUNCTIONS: dict[str, Function] = {
    "abs": np.abs,
    "acos": np.arccos,
    "acosh": np.arccosh,
    "add_rn": np.add,
    "asin": np.arcsin,
    "asinh": np.arcsinh,
    "atan": np.arctan,
    "atan2": np.arctan2,
    "atanh": np.arctanh,
    "cbrt": np.cbrt,
    "ceil": np.ceil,
    "copysign": np.copysign,
    "cos": np.cos,
    "cosh": np.cosh,
    "cospi": lambda x: np.cos(np.pi * np.remainder(x, 2.0)),
    "cyl_bessel_i0": _torch(torch.special.i0),
    "cyl_bessel_i1": _torch(torch.special.i1),
    "div_rn": np.divide,
    "erf": _torch(torch.special.erf),
    "erfc": _torch(torch.special.erfc),
    "erfcinv": _torch(lambda x: torch.special.erfinv(1 - x)),
    "erfcx": _torch(torch.special.erfcx),
    "erfinv": _torch(torch.special.erfinv),
    "exp": np.exp,
    "exp10": lambda x: np.power(10.0, x),
    "exp2": np.exp2,
    "expm1": np.expm1,
    "fast_cosf": np.cos,
    "fast_dividef": np.divide,
    "fast_exp10f": lambda x: np.power(10.0, x),
    "fast_expf": np.exp,
    "fast_log10f": np.log10,
    "fast_log2f": np.log2,
    "fast_logf": np.log,
    "fast_powf": np.power,
    "fast_sinf": np.sin,
    "fast_tanf": np.tan,
    "fast_tanhf": np.tanh,
    "fdim": lambda x, y: np.maximum(x - y, 0.0),
    "finitef": np.isfinite,
    "floor": np.floor,
    "fma": _fma,
    "fma_rn": _fma,
    "fmod": np.fmod,
    "hypot": np.hypot,
    "ilogb": _ilogb,
    "isfinited": np.isfinite,
    "isinf": np.isinf,
    "isnan": np.isnan,
    "j0": _torch(torch.special.bessel_j0),
    "j1": _torch(torch.special.bessel_j1),
    "ldexp": lambda x, n: np.ldexp(x, n.astype(np.int32)),
    "lgamma": _lgamma,
    "llrint": np.rint,
    "llround": _round,
    "log": np.log,
    "log10": np.log10,
    "log1p": np.log1p,
    "log2": np.log2,
    "logb": lambda x: np.where(x == 0, -np.inf, np.floor(np.log2(np.abs(x)))),
    "mul_rn": np.multiply,
    "nearbyint": np.rint,
    "normcdf": lambda x: 0.5 * FUNCTIONS["erfc"](-x * SQRT_HALF),
    "normcdfinv": _torch(torch.special.ndtri),
    "pow": np.power,
    "rcp_rn": np.reciprocal,
    "remainder": lambda x, y: x - y * np.rint(x / y),
    "rint": np.rint,
    "round": _round,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "rsqrt_rn": lambda x: 1.0 / np.sqrt(x),
    "saturatef": lambda x: np.clip(np.nan_to_num(x, nan=0.0), 0.0, 1.0),
    "scalbn": lambda x, n: np.ldexp(x, n.astype(np.int32)),
    "signbit": np.signbit,
    "sin": np.sin,
    "sinh": np.sinh,
    "sinpi": lambda x: np.sin(np.pi * np.remainder(x, 2.0)),
    "sqrt": np.sqrt,
    "sqrt_rn": np.sqrt,
    "sub_rn": np.subtract,
    "tan": np.tan,
    "tanh": np.tanh,
    "tgamma": _tgamma,
    "trunc": np.trunc,
    "y0": _torch(torch.special.bessel_y0),
    "y1": _torch(torch.special.bessel_y1),
}
"""Functions of float64 arrays by their names in libdevice."""

IN_ITS_TYPE: dict[str, Function] = {
    "nextafter": np.nextafter,
    "float_as_int": lambda x: x.view(np.int32),
    "int_as_float": lambda x: x.view(np.float32),
    "double_as_longlong": lambda x: x.view(np.int64),
    "longlong_as_double": lambda x: x.view(np.float64),
    "mulhi": lambda x, y: (x.astype(np.int64) * y.astype(np.int64)) >> 32,
}
"""Functions that depend on the type of their arguments."""


def evaluate(name: str, arguments: list[np.ndarray], dtype: np.dtype[Any]) -> np.ndarray:
    """Return a function of libdevice as an array of `dtype`.

    Raises NotImplementedError for a function that is not in the tables.
    """
    with np.errstate(all="ignore"):
        if name in IN_ITS_TYPE:
            result = IN_ITS_TYPE[name](*arguments)
        elif name in FUNCTIONS:
            result = FUNCTIONS[name](*(array.astype(np.float64) for array in arguments))
        else:
            raise NotImplementedError(
                f"libdevice.{name} is not computed on the host: add it to "
                "scripts/software_gpu/numbers/libdevice.py"
            )
        return np.asarray(result).astype(dtype)
