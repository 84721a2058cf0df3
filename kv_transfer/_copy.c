/* Copies scattered pages of a KV cache in one call, the interpreter lock released.

   On x86-64 with streaming stores: the lines that are overwritten need not be read first, and the
   KV of other requests stays in the cache. A page of 16 KiB ends before the hardware has seen its
   pattern, and begins with a walk through the page tables, so each 4 KiB of a page touch the same
   place of the next one (benchmarks/NOTES.md has the figures). Elsewhere memcpy. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define LINE 64
#define AHEAD 512
#define VM_PAGE 4096
/* Shorter pages end before the streaming has begun. */
#define MIN_STREAMED 1024
/* Less is copied sooner than the lock is given away and taken back. */
#define MIN_UNLOCKED (64 << 10)

typedef struct {
    char *address;
    Py_ssize_t layer_stride, block_stride;
    Py_ssize_t *ids;
} Pages;

static void copy_page(char *to, const char *from, size_t size, const char *next_to,
                      const char *next_from)
{
#ifdef __SSE2__
    if (size >= MIN_STREAMED) {
        size_t head = -(uintptr_t)to % LINE, at = head;
        memcpy(to, from, head);
        for (; at + LINE <= size; at += LINE) {
            if ((at - head) % VM_PAGE == 0) {
                _mm_prefetch(next_from + at, _MM_HINT_T0);
                _mm_prefetch(next_to + at, _MM_HINT_T0);
            }
            _mm_prefetch(from + at + AHEAD, _MM_HINT_NTA);
            for (size_t i = at; i < at + LINE; i += sizeof(__m128i))
                _mm_stream_si128((__m128i *)(to + i), _mm_loadu_si128((const __m128i *)(from + i)));
        }
        memcpy(to + at, from + at, size - at);
        return;
    }
#endif
    memcpy(to, from, size);
}

static void copy_layer(char *to, const Pages *ours, const char *from, const Pages *theirs,
                       Py_ssize_t blocks, size_t size)
{
    for (Py_ssize_t b = 0; b < blocks; b++) {
        Py_ssize_t next = b + 1 < blocks ? b + 1 : b;
        copy_page(to + ours->ids[b] * ours->block_stride,
                  from + theirs->ids[b] * theirs->block_stride, size,
                  to + ours->ids[next] * ours->block_stride,
                  from + theirs->ids[next] * theirs->block_stride);
    }
}

static Py_ssize_t *ids_of(PyObject *list)
{
    Py_ssize_t count = PyList_GET_SIZE(list);
    Py_ssize_t *ids = PyMem_New(Py_ssize_t, count ? count : 1);
    if (ids == NULL)
        return (Py_ssize_t *)PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count; i++) {
        ids[i] = PyLong_AsSsize_t(PyList_GET_ITEM(list, i));
        if (ids[i] == -1 && PyErr_Occurred()) {
            PyMem_Free(ids);
            return NULL;
        }
    }
    return ids;
}

static PyObject *copy_pages(PyObject *self, PyObject *args)
{
    Py_ssize_t to, from, layers, size;
    Pages ours, theirs;
    PyObject *our_ids, *their_ids, *result = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "nnnO!nnnO!nn", &to, &ours.layer_stride, &ours.block_stride,
                          &PyList_Type, &our_ids, &from, &theirs.layer_stride,
                          &theirs.block_stride, &PyList_Type, &their_ids, &layers, &size))
        return NULL;
    ours.address = (char *)to, theirs.address = (char *)from;
    Py_ssize_t blocks = PyList_GET_SIZE(our_ids);
    if (PyList_GET_SIZE(their_ids) != blocks || size < 0) {
        PyErr_SetString(PyExc_ValueError, "as many blocks as places, and pages of some size");
        return NULL;
    }
    ours.ids = ids_of(our_ids);
    theirs.ids = ours.ids == NULL ? NULL : ids_of(their_ids);
    if (theirs.ids != NULL) {
        int is_long = layers * blocks * size >= MIN_UNLOCKED;
        PyThreadState *state = is_long ? PyEval_SaveThread() : NULL;
        for (Py_ssize_t layer = 0; layer < layers; layer++)
            copy_layer(ours.address + layer * ours.layer_stride, &ours,
                       theirs.address + layer * theirs.layer_stride, &theirs, blocks,
                       (size_t)size);
#ifdef __SSE2__
        _mm_sfence(); /* whoever is told of the copy finds it */
#endif
        if (state != NULL)
            PyEval_RestoreThread(state);
        result = Py_NewRef(Py_None);
    }
    PyMem_Free(theirs.ids);
    PyMem_Free(ours.ids);
    return result;
}

static PyMethodDef methods[] = {
    {"copy_pages", copy_pages, METH_VARARGS, "See kv_transfer/copying.py."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_copy", .m_size = 0, .m_methods = methods,
};

PyMODINIT_FUNC PyInit__copy(void)
{
    return PyModuleDef_Init(&module);
}
