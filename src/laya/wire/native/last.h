/* The last head that was recognised on a connection, which is mostly that of its next message too: one comparison then, where
   else the head's end is searched, and a copy of it made and hashed. It may hold credentials, as the memo does. */
#ifndef LAYA_LAST_H
#define LAYA_LAST_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

typedef struct { /* zeroed at first */
    PyObject *key;    /* as in the memo: the head without the digits of its length; owned; NULL: none yet */
    Py_ssize_t first; /* its bytes before the digits */
} Last;

#endif
