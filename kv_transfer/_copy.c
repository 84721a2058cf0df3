/* Copies scattered pages of a KV cache and digests them in one pass. cache/host_memory.py describes
   the digest and computes the same in Python. */

#define Py_LIMITED_API 0x030B0000 /* one wheel for Python 3.11 and every later version */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define ROW 16
#define MIN_UNLOCKED (64 << 10) /* shorter copies keep the interpreter lock */
#define MIN_STREAMED 1024       /* pages from this size on are written without the CPU cache */
#define INTO_L2 2
#define AHEAD (32 << 10)        /* prefetch distance in bytes, at most a page; fits in L2 */

typedef uint64_t Row __attribute__((vector_size(ROW)));
typedef struct {
    Row sums, running;
} Digest;
typedef struct {
    char *address;
    Py_ssize_t layer_stride, block_stride, *ids;
} Pages;

static inline void add(Digest *digest, Row row)
{
    digest->sums += row;
    digest->running += digest->sums;
}

/* Digests a page, and copies it unless `to` is NULL. Prefetches, into the page at `next`, too,
   because the processor's own prefetch starts anew in each 4 KiB. */
static void absorb(Digest *digest, char *to, const char *from, const char *next, size_t size)
{
    Digest d = *digest;
    size_t at = 0, ahead = size < AHEAD ? size : AHEAD;
    int is_streamed = 0;
#ifdef __SSE2__
    is_streamed = to != NULL && (uintptr_t)to % ROW == 0 && size >= MIN_STREAMED;
#endif
    for (; at + 4 * ROW <= size; at += 4 * ROW) {
        Row rows[4];
        __builtin_prefetch(at + ahead < size ? from + at + ahead : next + (at + ahead - size), 0,
                           INTO_L2);
        memcpy(rows, from + at, sizeof rows);
#ifdef __SSE2__
        for (int i = 0; is_streamed && i < 4; i++)
            _mm_stream_si128((__m128i *)(to + at) + i, (__m128i)rows[i]);
#endif
        for (int i = 0; i < 4; i++)
            add(&d, rows[i]);
    }
    size_t copied = is_streamed ? at : 0;
    for (; at < size; at += ROW) {
        Row row = {0};
        memcpy(&row, from + at, size - at < ROW ? size - at : ROW);
        add(&d, row);
    }
    if (to != NULL && copied < size)
        memcpy(to + copied, from + copied, size - copied);
    *digest = d;
}

static uint64_t finish(const Digest *digest)
{
    uint64_t words[sizeof *digest / sizeof(uint64_t)], value = 0;
    memcpy(words, digest, sizeof words);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        value = (value ^ words[i]) * 0x9E3779B97F4A7C15u;
        value ^= value >> 32;
    }
    return value;
}

static Py_ssize_t *ids_of(PyObject *list)
{
    Py_ssize_t count = PyList_Size(list);
    Py_ssize_t *ids = PyMem_Malloc((size_t)(count ? count : 1) * sizeof *ids);
    if (ids == NULL)
        return (Py_ssize_t *)PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count; i++) {
        ids[i] = PyLong_AsSsize_t(PyList_GetItem(list, i));
        if (ids[i] == -1 && PyErr_Occurred()) {
            PyMem_Free(ids);
            return NULL;
        }
    }
    return ids;
}

static inline char *page_at(const Pages *pages, Py_ssize_t layer, Py_ssize_t block)
{
    return pages->address + layer * pages->layer_stride + pages->ids[block] * pages->block_stride;
}

/* Returns the digests of the blocks, eight bytes each. */
static PyObject *run(const Pages *to, const Pages *from, Py_ssize_t blocks, Py_ssize_t layers,
                     Py_ssize_t size)
{
    PyObject *result = PyBytes_FromStringAndSize(NULL, blocks * (Py_ssize_t)sizeof(uint64_t));
    if (result == NULL)
        return NULL;
    char *digests = PyBytes_AsString(result);
    PyThreadState *state = layers * blocks * size >= MIN_UNLOCKED ? PyEval_SaveThread() : NULL;
    for (Py_ssize_t block = 0; block < blocks; block++) {
        Digest digest = {{0}, {0}};
        for (Py_ssize_t layer = 0; layer < layers; layer++) {
            Py_ssize_t is_last = layer + 1 == layers;
            Py_ssize_t next = is_last && block + 1 < blocks ? block + 1 : block;
            absorb(&digest, to == NULL ? NULL : page_at(to, layer, block),
                   page_at(from, layer, block), page_at(from, is_last ? 0 : layer + 1, next),
                   (size_t)size);
        }
        uint64_t value = finish(&digest);
        memcpy(digests + block * (Py_ssize_t)sizeof value, &value, sizeof value);
    }
#ifdef __SSE2__
    _mm_sfence();
#endif
    if (state != NULL)
        PyEval_RestoreThread(state);
    return result;
}

static PyObject *copy(PyObject *self, PyObject *args)
{
    Py_ssize_t source, target, layers, size;
    Pages from, to;
    PyObject *source_ids, *target_ids, *result = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "nnnO!nnnO!nn", &source, &from.layer_stride, &from.block_stride,
                          &PyList_Type, &source_ids, &target, &to.layer_stride, &to.block_stride,
                          &PyList_Type, &target_ids, &layers, &size))
        return NULL;
    from.address = (char *)source, to.address = (char *)target;
    from.ids = ids_of(source_ids);
    to.ids = from.ids == NULL ? NULL : ids_of(target_ids);
    if (to.ids != NULL && PyList_Size(source_ids) == PyList_Size(target_ids))
        result = run(&to, &from, PyList_Size(source_ids), layers, size);
    else if (to.ids != NULL)
        PyErr_SetString(PyExc_ValueError, "source and target differ in number of blocks");
    PyMem_Free(to.ids);
    PyMem_Free(from.ids);
    return result;
}

static PyObject *digest(PyObject *self, PyObject *args)
{
    Py_ssize_t source, layers, size;
    Pages from;
    PyObject *ids, *result;
    (void)self;
    if (!PyArg_ParseTuple(args, "nnnO!nn", &source, &from.layer_stride, &from.block_stride,
                          &PyList_Type, &ids, &layers, &size))
        return NULL;
    from.address = (char *)source;
    from.ids = ids_of(ids);
    if (from.ids == NULL)
        return NULL;
    result = run(NULL, &from, PyList_Size(ids), layers, size);
    PyMem_Free(from.ids);
    return result;
}

static PyMethodDef methods[] = {
    {"copy", copy, METH_VARARGS, "See KvRegion.copy_from."},
    {"digest", digest, METH_VARARGS, "See KvRegion.digest."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_copy", .m_size = 0, .m_methods = methods,
};

PyMODINIT_FUNC PyInit__copy(void)
{
    return PyModule_Create(&module);
}
