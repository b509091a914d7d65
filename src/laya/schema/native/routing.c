/* `scan` for Python: see routing.h, and laya.schema.fields, which calls it. */

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

static PyMethodDef functions[] = {
    {"scan", scan, METH_O, "(model, stream) of a body of the common kind, else None. Raises TypeError for what is not bytes."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "native_routing", NULL, 0, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_native_routing(void) { return PyModule_Create(&definition); }
