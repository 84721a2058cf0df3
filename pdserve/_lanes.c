/* Writes the tokens of one frame to the clients of their answers, in one call: see lanes.py.

   A token costs a look-up, a copy between bytes that were made once and send(2). Between two frames
   other processes have had the processor, so what counts is how much memory is touched. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdio.h>
#include <string.h>
#include <structmember.h>
#include <sys/socket.h>

/* Larger events, with all that could be escaped, are left to Python. */
#define MAX_EVENT 8192
#define MAX_CHUNK_HEAD 18
/* "\u001f" */
#define MAX_ESCAPED 6

typedef struct {
    PyObject_HEAD
    int fd;
    /* `clear`: the transport held nothing, and since then nobody but the lane has written. */
    char takes, waits, clear;
    PyObject *unsent, *write, *before, *after, *tokens;
} Lane;

static int lane_init(PyObject *object, PyObject *args, PyObject *names)
{
    static char *keys[] = {"fd", "unsent", "write", "before", "after", NULL};
    Lane *lane = (Lane *)object;
    PyObject *unsent, *write, *before, *after;
    int fd;
    if (!PyArg_ParseTupleAndKeywords(args, names, "iOOSS", keys, &fd, &unsent, &write, &before,
                                     &after))
        return -1;
    lane->fd = fd;
    Py_XSETREF(lane->unsent, Py_NewRef(unsent));
    Py_XSETREF(lane->write, Py_NewRef(write));
    Py_XSETREF(lane->before, Py_NewRef(before));
    Py_XSETREF(lane->after, Py_NewRef(after));
    return 0;
}

static int lane_traverse(PyObject *object, visitproc visit, void *arg)
{
    Lane *lane = (Lane *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(lane->unsent);
    Py_VISIT(lane->write);
    Py_VISIT(lane->before);
    Py_VISIT(lane->after);
    Py_VISIT(lane->tokens);
    return 0;
}

static int lane_clear(PyObject *object)
{
    Lane *lane = (Lane *)object;
    lane->takes = 0;
    Py_CLEAR(lane->unsent);
    Py_CLEAR(lane->write);
    Py_CLEAR(lane->before);
    Py_CLEAR(lane->after);
    Py_CLEAR(lane->tokens);
    return 0;
}

static void lane_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    lane_clear(object);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyObject *lane_waits(PyObject *object, void *closure)
{
    return PyBool_FromLong(((Lane *)object)->waits);
}

static PyObject *lane_tokens(PyObject *object, void *closure)
{
    PyObject *tokens = ((Lane *)object)->tokens;
    return Py_NewRef(tokens == NULL ? Py_None : tokens);
}

/* Who sets these may have written to the transport before. */
static int lane_set_waits(PyObject *object, PyObject *value, void *closure)
{
    int waits = value == NULL ? 0 : PyObject_IsTrue(value);
    ((Lane *)object)->waits = waits > 0;
    ((Lane *)object)->clear = 0;
    return waits < 0 ? -1 : 0;
}

static int lane_set_tokens(PyObject *object, PyObject *value, void *closure)
{
    Py_XSETREF(((Lane *)object)->tokens, Py_XNewRef(value));
    ((Lane *)object)->clear = 0;
    return 0;
}

static PyGetSetDef lane_properties[] = {
    {"waits", lane_waits, lane_set_waits, NULL, NULL},
    {"tokens", lane_tokens, lane_set_tokens, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef lane_members[] = {
    {"takes", T_BOOL, offsetof(Lane, takes), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot lane_slots[] = {
    {Py_tp_doc, "See pdserve/lanes.py."},
    {Py_tp_init, lane_init},
    {Py_tp_traverse, lane_traverse},
    {Py_tp_clear, lane_clear},
    {Py_tp_dealloc, lane_dealloc},
    {Py_tp_members, lane_members},
    {Py_tp_getset, lane_properties},
    {0, NULL},
};

static PyType_Spec lane_spec = {
    "pdserve._lanes.Lane", sizeof(Lane), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, lane_slots,
};

/* As json.encoder.encode_basestring: what JSON asks to be escaped, and nothing else. */
static char *write_string(char *to, const char *text, Py_ssize_t size)
{
    *to++ = '"';
    for (const char *at = text; at < text + size; at++) {
        unsigned char c = (unsigned char)*at;
        /* By their code, from 8 on. */
        char name = c >= '\b' && c <= '\r' ? "btn\0fr"[c - '\b'] : 0;
        if (c >= ' ' && c != '"' && c != '\\')
            *to++ = (char)c;
        else if (c >= ' ' || name) {
            *to++ = '\\';
            *to++ = name ? name : (char)c;
        } else
            to += sprintf(to, "\\u%04x", c);
    }
    *to++ = '"';
    return to;
}

/* One chunk of a body (RFC 9112, 7.1) with the token's event. Returns its size, 0 where it is too
   large. */
static size_t write_event(char *to, const Lane *lane, const char *text, Py_ssize_t size)
{
    char string[MAX_EVENT];
    Py_ssize_t before = PyBytes_GET_SIZE(lane->before), after = PyBytes_GET_SIZE(lane->after);
    if (size > MAX_EVENT || before > MAX_EVENT || after > MAX_EVENT
        || MAX_CHUNK_HEAD + before + MAX_ESCAPED * size + 2 + after + 2 > MAX_EVENT)
        return 0;
    size_t length = (size_t)(write_string(string, text, size) - string);
    char *at = to + sprintf(to, "%zx\r\n", (size_t)(before + after) + length);
    at = (char *)memcpy(at, PyBytes_AS_STRING(lane->before), before) + before;
    at = (char *)memcpy(at, string, length) + length;
    at = (char *)memcpy(at, PyBytes_AS_STRING(lane->after), after) + after;
    *at++ = '\r', *at++ = '\n';
    return (size_t)(at - to);
}

/* What the kernel does not take now, the transport sends later; it also finds out why. */
static int send_event(Lane *lane, const char *event, size_t size)
{
    ssize_t sent = send(lane->fd, event, size, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent == (ssize_t)size)
        return 0;
    if (sent < 0)
        sent = 0;
    lane->clear = 0;
    PyObject *rest = PyBytes_FromStringAndSize(event + sent, (Py_ssize_t)(size - (size_t)sent));
    PyObject *done = rest == NULL ? NULL : PyObject_CallOneArg(lane->write, rest);
    Py_XDECREF(rest);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* 1 where the transport holds bytes that come before, 0 where not, -1 with an error. To ask it for
   each token would touch memory that nothing else of the token does. */
static int has_unsent(Lane *lane)
{
    if (lane->clear)
        return 0;
    PyObject *unsent = PyObject_CallNoArgs(lane->unsent);
    int found = unsent == NULL ? -1 : PyObject_IsTrue(unsent);
    Py_XDECREF(unsent);
    lane->clear = found == 0;
    return found;
}

/* 1 where the token has gone, 0 where it is left, -1 with an error. */
static int pass_token(Lane *lane, PyObject *token_id, PyObject *text)
{
    char event[MAX_EVENT];
    Py_ssize_t text_size;
    if (!lane->takes || !lane->waits || lane->tokens == NULL || !PyList_Check(lane->tokens))
        return 0;
    const char *utf8 = PyUnicode_AsUTF8AndSize(text, &text_size);
    if (utf8 == NULL)
        return -1;
    int unsent = has_unsent(lane);
    if (unsent != 0)
        return unsent < 0 ? -1 : 0;
    size_t size = text_size ? write_event(event, lane, utf8, text_size) : 0;
    if (text_size && !size) {
        lane->clear = 0; /* others write it */
        return 0;
    }
    if (PyList_Append(lane->tokens, token_id) < 0)
        return -1;
    if (size && send_event(lane, event, size) < 0)
        return -1;
    return 1;
}

static int pass_all(PyTypeObject *lane_type, PyObject *lanes, PyObject *lists[3], PyObject *left)
{
    Py_ssize_t count = PyList_GET_SIZE(lists[0]);
    for (Py_ssize_t i = 0; i < count; i++) {
        /* Borrowed: the caller holds the lists, and a lane may leave the dictionary in between. */
        PyObject *lane = PyDict_GetItemWithError(lanes, PyList_GET_ITEM(lists[0], i));
        if (lane == NULL && PyErr_Occurred())
            return -1;
        int passed = 0;
        if (lane != NULL && PyObject_TypeCheck(lane, lane_type)) {
            Py_INCREF(lane);
            passed = pass_token((Lane *)lane, PyList_GET_ITEM(lists[1], i),
                                PyList_GET_ITEM(lists[2], i));
            Py_DECREF(lane);
        }
        if (passed < 0)
            return -1;
        if (!passed) {
            PyObject *index = PyLong_FromSsize_t(i);
            int kept = index == NULL ? -1 : PyList_Append(left, index);
            Py_XDECREF(index);
            if (kept < 0)
                return -1;
        }
    }
    return 0;
}

static PyObject *pass_on(PyObject *module, PyObject *args)
{
    PyObject *lanes, *given[3], *lists[3] = {NULL, NULL, NULL}, *left = PyList_New(0);
    PyTypeObject *lane_type = *(PyTypeObject **)PyModule_GetState(module);
    int passed = -1;
    if (left == NULL || !PyArg_ParseTuple(args, "O!OOO", &PyDict_Type, &lanes, &given[0], &given[1],
                                          &given[2]))
        goto end;
    for (int i = 0; i < 3; i++)
        if ((lists[i] = PySequence_List(given[i])) == NULL)
            goto end;
    if (PyList_GET_SIZE(lists[0]) != PyList_GET_SIZE(lists[1])
        || PyList_GET_SIZE(lists[0]) != PyList_GET_SIZE(lists[2])) {
        PyErr_SetString(PyExc_ValueError, "as many tokens and texts as streams");
        goto end;
    }
    passed = pass_all(lane_type, lanes, lists, left);
end:
    for (int i = 0; i < 3; i++)
        Py_XDECREF(lists[i]);
    if (passed < 0)
        Py_CLEAR(left);
    return left;
}

static int module_exec(PyObject *module)
{
    PyTypeObject **lane_type = PyModule_GetState(module);
    *lane_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &lane_spec, NULL);
    return *lane_type == NULL ? -1 : PyModule_AddType(module, *lane_type);
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    Py_VISIT(*(PyTypeObject **)PyModule_GetState(module));
    return 0;
}

static int module_clear(PyObject *module)
{
    Py_CLEAR(*(PyTypeObject **)PyModule_GetState(module));
    return 0;
}

static PyMethodDef methods[] = {
    {"pass_on", pass_on, METH_VARARGS, "See pdserve/lanes.py."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_lanes",          .m_size = sizeof(PyTypeObject *),
    .m_methods = methods,  .m_slots = slots,            .m_traverse = module_traverse,
    .m_clear = module_clear,
};

PyMODINIT_FUNC PyInit__lanes(void)
{
    return PyModuleDef_Init(&module);
}
