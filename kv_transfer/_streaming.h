/* Copies one page past the caches.

   On x86-64 with streaming stores: the lines that are overwritten need not be read first, and the
   KV of other requests stays in the cache. A page of 16 KiB ends before the hardware has seen its
   pattern, which it looks for in each 4 KiB anew, and begins with a walk through the page tables. So
   beside each span of a page the next one is fetched, of all its 4 KiB at once, a line of each in
   turn (benchmarks/NOTES.md has the figures). Elsewhere memcpy. */

#ifndef PDSERVE_KV_STREAMING_H
#define PDSERVE_KV_STREAMING_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define LINE 64
#define VM_PAGE 4096
#define SPAN (4 * VM_PAGE)
/* Shorter pages end before the streaming has begun. */
#define MIN_STREAMED 1024
#ifdef __SSE2__
/* What is fetched next: `size` bytes from `from` on, of which each VM_PAGE is `line` bytes done. */
typedef struct {
    const char *from;
    size_t size, page, line;
} Ahead;

/* Of the span of a page that begins at `at`: the one behind it, or the first of the next page. */
static inline Ahead look_ahead(const char *to, const char *from, size_t at, size_t size,
                               const char *next_to, const char *next_from)
{
    size_t left = size - at;
    Ahead ahead = {next_from, size < SPAN ? size : SPAN, 0, 0};
    if (left > SPAN) {
        ahead.from = from + at + SPAN;
        ahead.size = left - SPAN < SPAN ? left - SPAN : SPAN;
        next_to = to == NULL ? NULL : to + at + SPAN;
    }
    for (size_t page = 0; next_to != NULL && page < ahead.size; page += VM_PAGE)
        _mm_prefetch(next_to + page, _MM_HINT_T0); /* for its address alone */
    return ahead;
}

static inline void fetch(Ahead *ahead)
{
    _mm_prefetch(ahead->from + ahead->page + ahead->line, _MM_HINT_T1);
    ahead->page += VM_PAGE;
    if (ahead->page >= ahead->size) {
        ahead->page = 0;
        ahead->line += LINE;
    }
}
#endif

static void copy_page(char *to, const char *from, size_t size, const char *next_to,
                      const char *next_from)
{
#ifdef __SSE2__
    if (size >= MIN_STREAMED) {
        size_t at = -(uintptr_t)to % LINE;
        memcpy(to, from, at);
        while (at + LINE <= size) {
            Ahead ahead = look_ahead(to, from, at, size, next_to, next_from);
            for (size_t end = at + SPAN; at < end && at + LINE <= size; at += LINE) {
                fetch(&ahead);
                for (size_t i = at; i < at + LINE; i += sizeof(__m128i))
                    _mm_stream_si128((__m128i *)(to + i),
                                     _mm_loadu_si128((const __m128i *)(from + i)));
            }
        }
        memcpy(to + at, from + at, size - at);
        return;
    }
#endif
    (void)next_to, (void)next_from;
    memcpy(to, from, size);
}

#endif
