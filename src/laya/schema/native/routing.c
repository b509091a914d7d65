/* `scan` for laya.schema.fields and `spans` for laya.schema.pieces: see routing.h. */

#include "routing.h"

static PyObject *scan(PyObject *module, PyObject *body) {
    char *begin;
    Py_ssize_t length;
    PyObject *model, *stream;
    if (PyBytes_AsStringAndSize(body, &begin, &length)) return NULL;
    int judged = routing_of(begin, length, &model, &stream);
    if (judged <= 0) return judged < 0 ? NULL : Py_NewRef(Py_None);
    PyObject *result = PyTuple_Pack(2, model, stream);
    Py_DECREF(model);
    return result;
}

/* A large body is followed without the interpreter, so that the loop goes on meanwhile. */
static PyObject *spans(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    enum { MOST = 4096 };
    char *begin;
    Py_ssize_t length, most, longest_key;
    if (count != 3) return PyErr_Format(PyExc_TypeError, "spans(body: bytes, most: int, longest_key: int)");
    if (PyBytes_AsStringAndSize(given[0], &begin, &length)) return NULL;
    most = PyLong_AsSsize_t(given[1]);
    longest_key = PyLong_AsSsize_t(given[2]);
    if (PyErr_Occurred()) return NULL;
    if (most < 0 || most > MOST) return PyErr_Format(PyExc_ValueError, "at most %d members", MOST);
    Span *found = PyMem_Malloc((most + 1) * sizeof *found);
    if (!found) return PyErr_NoMemory();
    Py_ssize_t members;
    Py_BEGIN_ALLOW_THREADS
    members = spans_in((At)begin, (At)begin + length, found, most, longest_key);
    Py_END_ALLOW_THREADS
    PyObject *result = members < 0 ? Py_NewRef(Py_None) : PyList_New(members);
    for (Py_ssize_t i = 0; result && i < members; i++) {
        Span *span = found + i;
        PyObject *pair = Py_BuildValue("((nn)(nn))", span->key, span->key_end, span->value, span->value_end);
        if (pair) PyList_SET_ITEM(result, i, pair);
        else Py_CLEAR(result);
    }
    PyMem_Free(found);
    return result;
}

static PyMethodDef functions[] = {
    {"spans", (PyCFunction)(void (*)(void))spans, METH_FASTCALL, "As laya.schema.pieces.member_spans, or None: not judged."},
    {"scan", scan, METH_O, "(model, stream) of a body of the common kind, else None. Raises TypeError for what is not bytes."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "native_routing", NULL, 0, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_native_routing(void) { return PyModule_Create(&definition); }
