/* Entry points: find an instruction set's kernels, run them with IEEE arithmetic, regardless of the thread's modes. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "lowbit.h"

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* Fastest first. */
static const struct lowbit_kernels *const ALL[] = {
#if defined(__x86_64__)
    &lowbit_avx512, &lowbit_avx2,
#endif
    &lowbit_portable,
};
enum { NUM_KERNELS = sizeof ALL / sizeof *ALL };

static int supported(const struct lowbit_kernels *kernels) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (kernels == &lowbit_avx2) return avx2;
    if (kernels == &lowbit_avx512)
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
    return kernels == &lowbit_portable;
}

/* Name of the index-th instruction set that this processor has, fastest first; NULL behind the last. */
EXPORT const char *lowbit_isa(int index) {
    for (int k = 0; k < NUM_KERNELS; k++)
        if (supported(ALL[k]) && index-- == 0) return ALL[k]->name;
    return NULL;
}

/* Handle of an instruction set by name, NULL if this processor lacks it. */
EXPORT const struct lowbit_kernels *lowbit_find(const char *name) {
    for (int k = 0; k < NUM_KERNELS; k++)
        if (supported(ALL[k]) && strcmp(ALL[k]->name, name) == 0) return ALL[k];
    return NULL;
}

EXPORT int lowbit_abi(void) { return LOWBIT_ABI; }

/* Subnormal numbers count in the definition: flushing them (torch.set_flush_denormal) must not change a byte. */
#if defined(__x86_64__)
#define MODES unsigned int modes = _mm_getcsr(); _mm_setcsr(0x1F80)
#define RESTORE _mm_setcsr(modes)
#elif defined(__aarch64__)
#define MODES uint64_t modes; __asm__ volatile("mrs %0, fpcr" : "=r"(modes)); \
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0))
#define RESTORE __asm__ volatile("msr fpcr, %0" : : "r"(modes))
#else
#define MODES (void)0
#define RESTORE (void)0
#endif

EXPORT int lowbit_encode(
    const struct lowbit_kernels *kernels, const struct lowbit_call *call, int64_t first, int64_t last
) {
    MODES;
    int flag = kernels->encode(call, first, last);
    RESTORE;
    return flag;
}

EXPORT void lowbit_decode_sum(
    const struct lowbit_kernels *kernels, const struct lowbit_call *call, int64_t first, int64_t last
) {
    MODES;
    kernels->decode_sum(call, first, last);
    RESTORE;
}

/* The functions are called through ctypes; the module exists so that setuptools builds and installs the file. */
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_lowbit", .m_size = -1};

PyMODINIT_FUNC PyInit__lowbit(void) { return PyModule_Create(&module); }
