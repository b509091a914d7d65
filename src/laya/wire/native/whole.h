/* One whole message whose head was seen before, recognised: `laya.wire.recall.whole` in C, which says what it does and why. */
#ifndef LAYA_WHOLE_H
#define LAYA_WHOLE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>

#define MAX_LENGTH_DIGITS 10 /* as fast.py has it */

static PyObject *name_body, *name_chunked;

typedef struct {
    PyObject *message;   /* borrowed from the memo of heads */
    const char *body;    /* in the bytes that came */
    Py_ssize_t length;   /* of the body */
    const char *digits;  /* of its length as they came; NULL: the head tells none */
    Py_ssize_t width;    /* of the digits */
} Whole;

/* The remembered message of a head without its length's digits, borrowed; NULL: none, or an exception. */
static PyObject *remembered(PyObject *heads, const char *head, Py_ssize_t first, const char *rest, Py_ssize_t second) {
    PyObject *key = PyBytes_FromStringAndSize(NULL, first + second);
    if (!key) return NULL;
    memcpy(PyBytes_AS_STRING(key), head, first);
    memcpy(PyBytes_AS_STRING(key) + first, rest, second);
    PyObject *message = PyDict_GetItemWithError(heads, key);
    Py_DECREF(key);
    return message;
}

/* 1: attribute `text` of `message` is `wanted`; 0: it is not; -1: an exception. `name` keeps the text as Python has it. */
static int has(PyObject *message, PyObject **name, const char *text, PyObject *wanted) {
    if (!*name && !(*name = PyUnicode_InternFromString(text))) return -1;
    PyObject *found = PyObject_GetAttr(message, *name);
    if (!found) return -1;
    Py_DECREF(found);
    return found == wanted;
}

/* 1: found; 0: not one whole message, or its head is not known; -1: an exception. `heads` is a dict. */
static int find_whole(
    const char *begin, Py_ssize_t size, PyObject *heads, Py_ssize_t max_head, long long max_body, Whole *found
) {
    const char *end = memmem(begin, size < max_head ? size : max_head, "\r\n\r\n", 4);
    if (!end) return 0;
    Py_ssize_t head = end - begin;
    found->body = end + 4;
    found->length = size - head - 4;

    const char *at = memmem(begin, head, "ength: ", 7);
    if (!at) {
        found->digits = NULL;
        found->message = remembered(heads, begin, head, end, 0);
        if (!found->message) return PyErr_Occurred() ? -1 : 0;
        return found->length ? 0 : has(found->message, &name_chunked, "chunked", Py_False);
    }
    const char *digits = at + 7, *stop = memmem(digits, end + 2 - digits, "\r\n", 2);
    found->digits = digits;
    found->width = stop - digits;
    if (found->width < 1 || found->width > MAX_LENGTH_DIGITS) return 0;
    long long length = 0;
    for (const char *p = digits; p < stop; p++) {
        if (*p < '0' || *p > '9') return 0;
        length = length * 10 + (*p - '0');
    }
    if (length != found->length || length > max_body) return 0;
    found->message = remembered(heads, begin, digits - begin, stop, end - stop);
    if (!found->message) return PyErr_Occurred() ? -1 : 0;
    return has(found->message, &name_body, "body", Py_None); /* one that is set: a status without a body, whatever length is told */
}

#endif
