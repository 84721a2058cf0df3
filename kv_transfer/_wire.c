/* Sends the pages of a KV cache over a connected socket, and receives them into their places: all of
   a chunk in one call, with the interpreter lock released, straight from the pages and into them. */

#include "_pages.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#define VECTORS 512

/* The pages in order, layer by layer; `at` counts them, `inside` bytes of that one are done. */
typedef struct {
    Pages pages;
    Py_ssize_t blocks, count, size, at, inside;
} Walk;

static char *address_of(const Walk *walk, Py_ssize_t at)
{
    const Pages *pages = &walk->pages;
    return pages->address + at / walk->blocks * pages->layer_stride
           + pages->ids[at % walk->blocks] * pages->block_stride;
}

/* Fills in what comes next, neighbours as one; returns how many vectors it took. */
static int vectors_of(const Walk *walk, struct iovec *vectors, int limit)
{
    int used = 0;
    for (Py_ssize_t at = walk->at; at < walk->count; at++) {
        Py_ssize_t inside = at == walk->at ? walk->inside : 0;
        char *start = address_of(walk, at) + inside;
        size_t size = (size_t)(walk->size - inside);
        if (used && (char *)vectors[used - 1].iov_base + vectors[used - 1].iov_len == start) {
            vectors[used - 1].iov_len += size;
            continue;
        }
        if (used == limit)
            break;
        vectors[used++] = (struct iovec){start, size};
    }
    return used;
}

static void advance(Walk *walk, Py_ssize_t bytes)
{
    bytes += walk->inside;
    walk->at += bytes / walk->size;
    walk->inside = bytes % walk->size;
}

static int walk_begin(Walk *walk, PyObject *ids, Py_ssize_t layers)
{
    if (layers < 0 || walk->size <= 0) {
        PyErr_SetString(PyExc_ValueError, "pages of some size");
        return -1;
    }
    walk->blocks = PyList_GET_SIZE(ids);
    walk->count = walk->blocks * layers;
    walk->at = walk->inside = 0;
    walk->pages.ids = ids_of(ids);
    return walk->pages.ids == NULL ? -1 : 0;
}

/* Whether a call that was interrupted is to be made again; else with an error. */
static int is_interrupted(void)
{
    if (errno == EINTR && PyErr_CheckSignals() == 0)
        return 1;
    if (!PyErr_Occurred())
        PyErr_SetFromErrno(PyExc_OSError);
    return 0;
}

/* Until all is sent or, with MSG_DONTWAIT, no more goes now. The bytes that went; -1 with an error. */
static Py_ssize_t send_walk(int fd, const char *head, Py_ssize_t head_size, Walk *walk, int flags)
{
    struct iovec vectors[VECTORS];
    Py_ssize_t sent = 0, total = head_size + walk->count * walk->size;
    while (sent < total) {
        int used = 0, error;
        ssize_t went;
        Py_BEGIN_ALLOW_THREADS
        if (sent < head_size)
            vectors[used++] = (struct iovec){(char *)head + sent, (size_t)(head_size - sent)};
        used += vectors_of(walk, vectors + used, VECTORS - used);
        struct msghdr message = {.msg_iov = vectors, .msg_iovlen = (size_t)used};
        went = sendmsg(fd, &message, flags | MSG_NOSIGNAL);
        error = errno;
        Py_END_ALLOW_THREADS
        errno = error;
        if (went < 0) {
            if ((flags & MSG_DONTWAIT) && (errno == EAGAIN || errno == EWOULDBLOCK))
                return sent;
            if (!is_interrupted())
                return -1;
            continue;
        }
        Py_ssize_t of_head = sent < head_size ? head_size - sent : 0;
        if (went > of_head)
            advance(walk, went - of_head);
        sent += went;
    }
    return sent;
}

/* The bytes that came: fewer than all where the peer has closed. -1 with an error. */
static Py_ssize_t receive_walk(int fd, Walk *walk)
{
    struct iovec vectors[VECTORS];
    Py_ssize_t start = walk->at * walk->size + walk->inside, total = walk->count * walk->size;
    Py_ssize_t got = start;
    while (got < total) {
        int error;
        ssize_t came;
        Py_BEGIN_ALLOW_THREADS
        struct msghdr message = {.msg_iov = vectors,
                                 .msg_iovlen = (size_t)vectors_of(walk, vectors, VECTORS)};
        /* Else a call would bring only what is there already. */
        came = recvmsg(fd, &message, MSG_WAITALL);
        error = errno;
        Py_END_ALLOW_THREADS
        errno = error;
        if (came < 0) {
            if (!is_interrupted())
                return -1;
            continue;
        }
        if (came == 0)
            break;
        advance(walk, came);
        got += came;
    }
    return got - start;
}

/* Puts what was received before into its places; how much of it there was room for. */
static Py_ssize_t place(Walk *walk, const char *data, Py_ssize_t size)
{
    Py_ssize_t placed = 0;
    struct iovec to;
    while (placed < size && vectors_of(walk, &to, 1)) {
        Py_ssize_t part = (Py_ssize_t)to.iov_len < size - placed ? (Py_ssize_t)to.iov_len
                                                                  : size - placed;
        memcpy(to.iov_base, data + placed, (size_t)part);
        advance(walk, part);
        placed += part;
    }
    return placed;
}

static PyObject *send_pages(PyObject *self, PyObject *args)
{
    int fd, flags;
    Walk walk;
    Py_buffer head;
    Py_ssize_t address, layers, sent = -1;
    PyObject *ids;
    (void)self;
    if (!PyArg_ParseTuple(args, "iy*innnO!nn", &fd, &head, &flags, &address,
                          &walk.pages.layer_stride, &walk.pages.block_stride, &PyList_Type, &ids,
                          &layers, &walk.size))
        return NULL;
    walk.pages.address = (char *)address;
    if (walk_begin(&walk, ids, layers) == 0) {
        sent = send_walk(fd, head.buf, head.len, &walk, flags);
        PyMem_Free(walk.pages.ids);
    }
    PyBuffer_Release(&head);
    return sent < 0 ? NULL : PyLong_FromSsize_t(sent);
}

static PyObject *receive_pages(PyObject *self, PyObject *args)
{
    int fd;
    Walk walk;
    Py_buffer ahead;
    Py_ssize_t address, layers, got = -1;
    PyObject *ids;
    (void)self;
    if (!PyArg_ParseTuple(args, "iy*nnnO!nn", &fd, &ahead, &address, &walk.pages.layer_stride,
                          &walk.pages.block_stride, &PyList_Type, &ids, &layers, &walk.size))
        return NULL;
    walk.pages.address = (char *)address;
    if (walk_begin(&walk, ids, layers) == 0) {
        if (place(&walk, ahead.buf, ahead.len) == ahead.len) {
            Py_ssize_t came = receive_walk(fd, &walk);
            got = came < 0 ? -1 : ahead.len + came;
        } else
            PyErr_SetString(PyExc_ValueError, "more was received before than there is room for");
        PyMem_Free(walk.pages.ids);
    }
    PyBuffer_Release(&ahead);
    return got < 0 ? NULL : PyLong_FromSsize_t(got);
}

static PyMethodDef methods[] = {
    {"send_pages", send_pages, METH_VARARGS, "See kv_transfer/scattering.py."},
    {"receive_pages", receive_pages, METH_VARARGS, "See kv_transfer/scattering.py."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_wire", .m_size = 0, .m_methods = methods,
};

PyMODINIT_FUNC PyInit__wire(void)
{
    return PyModuleDef_Init(&module);
}
