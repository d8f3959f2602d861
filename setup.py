"""The optional C extension; everything else about the package is in pyproject.toml."""

import sysconfig
from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("lowbit_strategy", "kernels", "native")
ABI3 = not sysconfig.get_config_var("Py_GIL_DISABLED")  # the free-threaded build has no stable ABI

# No -march: the files for AVX2 and AVX-512 say so themselves, and the processor is asked at run time. No contraction,
# no fast math: the kernels agree with the reference bit for bit.
extension = Extension(
    "lowbit_strategy.kernels.native._lowbit",
    sources=[
        str(NATIVE / name)
        for name in ("lowbit.c", "portable.c", "avx2.c", "avx512.c", "select.c", "sparse.c", "digest.c")
    ],
    depends=sorted(map(str, NATIVE.glob("*.h"))),
    extra_compile_args=["-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-g0"]
    + ["-Wno-psabi"],  # vectors are passed between inlined functions only
    define_macros=[("Py_LIMITED_API", "0x030A0000")] if ABI3 else [],
    py_limited_api=ABI3,
    optional=True,  # without a compiler the plain PyTorch path serves, and start-up reports say so
)

setup(ext_modules=[extension], options={"bdist_wheel": {"py_limited_api": "cp310"}} if ABI3 else {})
