/* The pages of some blocks of a KV cache, as kv_transfer/copying.py names them. */

#ifndef PDSERVE_KV_PAGES_H
#define PDSERVE_KV_PAGES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

typedef struct {
    char *address;
    Py_ssize_t layer_stride, block_stride;
    Py_ssize_t *ids;
} Pages;

/* NULL with an error, else to be freed with PyMem_Free. */
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

#endif
