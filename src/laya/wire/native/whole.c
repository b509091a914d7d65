/* `laya.wire.recall.whole` for Python. In: the bytes that just came, the memo of heads, and the bounds of head and body. Out:
   (message, body, digits of its length or None), or None. tests/wire/test_whole.py compares the two. */

#define _GNU_SOURCE /* memmem */
#include "whole.h"

static PyObject *whole(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    if (count != 4 || !PyBytes_Check(given[0]) || !PyDict_Check(given[1])) {
        PyErr_SetString(PyExc_TypeError, "whole(data: bytes, heads: dict, max_head_bytes: int, max_body_bytes: int)");
        return NULL;
    }
    Py_ssize_t max_head = PyLong_AsSsize_t(given[2]);
    long long max_body = PyLong_AsLongLong(given[3]);
    if (PyErr_Occurred()) return NULL;
    Whole found;
    int known = find_whole(PyBytes_AS_STRING(given[0]), PyBytes_GET_SIZE(given[0]), given[1], max_head, max_body, &found, NULL);
    if (known <= 0) return known < 0 ? NULL : Py_NewRef(Py_None);
    PyObject *body = PyBytes_FromStringAndSize(found.body, found.length);
    PyObject *digits = found.digits ? PyBytes_FromStringAndSize(found.digits, found.width) : Py_NewRef(Py_None);
    PyObject *result = body && digits ? PyTuple_Pack(3, found.message, body, digits) : NULL;
    Py_XDECREF(body);
    Py_XDECREF(digits);
    return result;
}

static PyMethodDef functions[] = {
    {"whole", (PyCFunction)(void (*)(void))whole, METH_FASTCALL, "As laya.wire.recall.whole."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "native_whole", NULL, 0, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_native_whole(void) { return PyModule_Create(&definition); }
