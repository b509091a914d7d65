/* A connected socket on the loop, read and written in C: `streams.c` says how, `laya/net/streams.py` for whom. */
#ifndef LAYA_STREAMS_H
#define LAYA_STREAMS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../../wire/native/last.h"

/* What came for `protocol`, offered to the lane; `last` is of its connection. TAKEN: it is done; REST: the protocol's `receive`
   goes on with it; ALL: its `data_received` does; -1: an exception. In lane.c. */
enum { REST, TAKEN, ALL };
int lane_takes(PyObject *protocol, const char *data, Py_ssize_t size, Last *last);

/* As time.perf_counter, s. In lane.c. */
double monotonic(void);

/* The exception that is set, taken; its traceback is with it. In lane.c. */
PyObject *take_raised(void);

#ifdef __linux__
typedef struct Streams Streams;

typedef struct {
    PyObject_HEAD
    Streams *streams;
    PyObject *protocol, *socket, *peer; /* the protocol is let go of when it was told of the end */
    PyObject *pieces;                   /* a list of what is not sent: objects with a buffer */
    Py_ssize_t first;                   /* bytes of the first of them that are sent */
    Py_ssize_t unsent, high;            /* bytes; where the protocol is asked to pause */
    Last last;
    int fd;
    unsigned int watched; /* the events that the kernel tells of */
    char connecting, reading, eof_read, told_to_pause; /* the last: its protocol may not write more for now */
    char eof_written, closing, lost;       /* no more is written; nor read; its end is told, or will be in the next turn */
} Stream;

extern PyTypeObject StreamType;
#define AS_STREAM(object) (Py_TYPE(object) == &StreamType ? (Stream *)(object) : NULL)

/* As transport.write. `owner`: whose buffer `data` is, or NULL. -1: an exception. */
int stream_write(Stream *stream, const char *data, Py_ssize_t size, PyObject *owner);

/* As transport.writelines of two bytes objects, neither empty. -1: an exception. */
int stream_write_both(Stream *stream, PyObject *head, PyObject *body);

/* Adds the types. -1: an exception. */
int add_streams(PyObject *module);
#else
typedef struct {
    Py_ssize_t unsent;
    char closing;
} Stream;
#define AS_STREAM(object) ((Stream *)NULL)
static inline int stream_write(Stream *stream, const char *data, Py_ssize_t size, PyObject *owner) { return -1; }
static inline int stream_write_both(Stream *stream, PyObject *head, PyObject *body) { return -1; }
static inline int add_streams(PyObject *module) { return 0; }
#endif

#endif
