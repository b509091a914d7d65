/* One whole message whose head was seen before, recognised: `laya.wire.recall.whole` in C, which says what it does and why. */
#ifndef LAYA_WHOLE_H
#define LAYA_WHOLE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>

#include "last.h"

#define MAX_LENGTH_DIGITS 10 /* as fast.py has it */

static PyObject *name_body, *name_chunked;

typedef struct {
    PyObject *message;   /* borrowed from the memo of heads */
    const char *body;    /* in the bytes that came */
    Py_ssize_t length;   /* of the body */
    const char *digits;  /* of its length as they came; NULL: the head tells none */
    Py_ssize_t width;    /* of the digits */
} Whole;

/* The remembered message of a head without its length's digits, borrowed; NULL: none, or an exception. `last` may be NULL. */
static PyObject *remembered(
    PyObject *heads, const char *head, Py_ssize_t first, const char *rest, Py_ssize_t second, Last *last
) {
    PyObject *key = PyBytes_FromStringAndSize(NULL, first + second);
    if (!key) return NULL;
    memcpy(PyBytes_AS_STRING(key), head, first);
    memcpy(PyBytes_AS_STRING(key) + first, rest, second);
    PyObject *message = PyDict_GetItemWithError(heads, key);
    if (message && last) {
        Py_XSETREF(last->key, key);
        last->first = first;
    } else {
        Py_DECREF(key);
    }
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

/* Not one whose body is set: a status without one, whatever length is told. As `has`. */
static int waits_for_a_body(PyObject *message) { return has(message, &name_body, "body", Py_None); }

/* The digits of a length, and what is behind them. -1: none that we read. */
static long long length_at(const char *digits, const char *end, const char **stop) {
    long long length = 0;
    const char *p = digits;
    for (; p < end && *p >= '0' && *p <= '9' && p - digits <= MAX_LENGTH_DIGITS; p++) length = length * 10 + (*p - '0');
    *stop = p;
    return p == digits || p - digits > MAX_LENGTH_DIGITS ? -1 : length;
}

/* As `find_whole`, for a head that is as the last one was; 0 says no more than that it is not. */
static int find_again(
    const char *begin, Py_ssize_t size, PyObject *heads, Py_ssize_t max_head, long long max_body, Whole *found, Last *last
) {
    Py_ssize_t all = PyBytes_GET_SIZE(last->key), second = all - last->first;
    const char *key = PyBytes_AS_STRING(last->key), *stop;
    if (size < all + 5 || memcmp(begin, key, last->first)) return 0;
    found->digits = begin + last->first;
    long long length = length_at(found->digits, begin + size, &stop);
    if (length < 0 || length > max_body) return 0;
    Py_ssize_t head = stop + second + 4 - begin;
    if (head > max_head || length != size - head) return 0;
    found->width = stop - found->digits;
    found->body = begin + head;
    found->length = (Py_ssize_t)length;
    if (memcmp(stop, key + last->first, second) || memcmp(stop + second, "\r\n\r\n", 4)) return 0;
    found->message = PyDict_GetItemWithError(heads, last->key);
    if (!found->message) Py_CLEAR(last->key); /* as the memo forgot it */
    return found->message ? waits_for_a_body(found->message) : PyErr_Occurred() ? -1 : 0;
}

/* 1: found; 0: not one whole message, or its head is not known; -1: an exception. `heads` is a dict; `last` may be NULL. */
static int find_whole(
    const char *begin, Py_ssize_t size, PyObject *heads, Py_ssize_t max_head, long long max_body, Whole *found, Last *last
) {
    int again = last && last->key ? find_again(begin, size, heads, max_head, max_body, found, last) : 0;
    if (again) return again;
    const char *end = memmem(begin, size < max_head ? size : max_head, "\r\n\r\n", 4);
    if (!end) return 0;
    Py_ssize_t head = end - begin;
    found->body = end + 4;
    found->length = size - head - 4;

    const char *at = memmem(begin, head, "ength: ", 7);
    if (!at) {
        found->digits = NULL;
        found->message = remembered(heads, begin, head, end, 0, NULL);
        if (!found->message) return PyErr_Occurred() ? -1 : 0;
        return found->length ? 0 : has(found->message, &name_chunked, "chunked", Py_False);
    }
    const char *digits = at + 7, *stop;
    long long length = length_at(digits, end, &stop);
    found->digits = digits;
    found->width = stop - digits;
    if (length < 0 || memcmp(stop, "\r\n", 2) || length != found->length || length > max_body) return 0;
    found->message = remembered(heads, begin, digits - begin, stop, end - stop, last);
    return found->message ? waits_for_a_body(found->message) : PyErr_Occurred() ? -1 : 0;
}

#endif
