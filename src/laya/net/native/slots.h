/* Attributes of Python objects whose classes have __slots__, read where they lie.

   A slot is a pointer at a fixed offset, which the class tells through its member descriptor. `resolve` looks all of them up
   once; a class that is made otherwise (by a compiler of Python, or without __slots__) is refused there, and nothing is read. */
#ifndef LAYA_SLOTS_H
#define LAYA_SLOTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

typedef struct {
    const char *class, *name;
    Py_ssize_t *offset;
} Slot;

#define AT(object, offset) (*(PyObject **)((char *)(object) + (offset)))

/* Give the slot a new value; takes the reference. */
static inline void put(PyObject *object, Py_ssize_t offset, PyObject *value) {
    PyObject *old = AT(object, offset);
    AT(object, offset) = value;
    Py_XDECREF(old);
}

static inline void set(PyObject *object, Py_ssize_t offset, PyObject *value) {
    Py_INCREF(value);
    put(object, offset, value);
}

/* Fill the offsets from `classes`, a dict by name. -1: an exception. */
static int resolve(const Slot *slots, PyObject *classes) {
    for (; slots->name; slots++) {
        PyObject *class = PyDict_GetItemString(classes, slots->class);
        PyObject *member = class ? PyObject_GetAttrString(class, slots->name) : NULL;
        PyMemberDef *slot = member && Py_TYPE(member) == &PyMemberDescr_Type ? ((PyMemberDescrObject *)member)->d_member : NULL;
        if (!slot || slot->type != T_OBJECT_EX) {
            Py_XDECREF(member);
            PyErr_Format(PyExc_TypeError, "%s.%s is no slot", slots->class, slots->name);
            return -1;
        }
        *slots->offset = slot->offset;
        Py_DECREF(member);
    }
    return 0;
}

#endif
