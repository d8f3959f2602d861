/* Counts the memory of one process, loaded before the C library: what is allocated now, and the most since a reset.

   Every thread's allocations are counted, those of torch, of gloo and of Python alike, by the sizes that the allocator
   has really given. On a CPU this is what torch.cuda.max_memory_allocated is on a GPU. */
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static _Atomic long now, peak;

static void *taken(void *at)
{
    if (at) {
        long held = (long)malloc_usable_size(at);
        long total = atomic_fetch_add(&now, held) + held, most = atomic_load(&peak);
        while (total > most && !atomic_compare_exchange_weak(&peak, &most, total)) {}
    }
    return at;
}

static void given(void *at)
{
    if (at) atomic_fetch_sub(&now, (long)malloc_usable_size(at));
}

void *malloc(size_t size) { return taken(__libc_malloc(size)); }
void *calloc(size_t count, size_t size) { return taken(__libc_calloc(count, size)); }
void *memalign(size_t alignment, size_t size) { return taken(__libc_memalign(alignment, size)); }
void *aligned_alloc(size_t alignment, size_t size) { return taken(__libc_memalign(alignment, size)); }

void *realloc(void *at, size_t size)
{
    long before = at ? (long)malloc_usable_size(at) : 0;
    void *moved = __libc_realloc(at, size);
    if (moved || size == 0) atomic_fetch_sub(&now, before);
    return taken(moved);
}

int posix_memalign(void **at, size_t alignment, size_t size)
{
    void *found = __libc_memalign(alignment, size);
    if (!found) return ENOMEM;
    *at = taken(found);
    return 0;
}

void free(void *at)
{
    given(at);
    __libc_free(at);
}

long lowbit_allocated(void) { return atomic_load(&now); }
long lowbit_peak(void) { return atomic_load(&peak); }
void lowbit_reset_peak(void) { atomic_store(&peak, atomic_load(&now)); }
