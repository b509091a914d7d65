/* Sockets on the loop with nothing of the loop's between the kernel and the lane.

   A transport of uvloop takes some three microseconds a request beside the four system calls: each read is two callbacks, each
   with the interpreter's lock taken and let go of, and an object for what came. Here all sockets are in one epoll set. What came
   is read into one buffer, offered to the lane where it lies, and answered by `send`. Timers, TLS, names and processes stay the
   loop's.

   `laya/net/loop.py` waits in that set (`wait`), with the loop's own files as one member of it: the kernel is asked once for
   both, and Python's part of a turn is left out while nothing but streams has something. On any other loop it is the set that
   is one file of the loop's (`run`).

   A `Stream` behaves as asyncio's transports do: what a protocol is told, when, and in which order. What is written goes out at
   once as far as the kernel takes it; the rest waits, with `pause_writing` and `resume_writing`. The events are level-triggered,
   and each gets one read and one write, so that nobody waits behind a fast peer. Loop thread only. */

#ifdef __linux__
#define _GNU_SOURCE
#include "streams.h"

#include <errno.h>
#include <math.h>
#include <structmember.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum {
    EVENTS = 128,             /* after which `run` or `wait` ends; the rest come in the loop's next turn */
    EVENTS_UNDISTURBED = 16,  /* then other threads may have the interpreter */
    LOOKS = 4, /* before the interpreter is let go of and we sleep: a thread that computes would have it between any two events */
    READ_BYTES = 64 * 1024,
    SEND_BYTES = 256 * 1024,  /* of one system call: to copy a megabyte holds the loop for half a millisecond */
    PIECES = 16,              /* of one system call */
    LONGEST_WAIT = 24 * 3600, /* s */
};

struct Streams {
    PyObject_HEAD
    PyObject *loop;
    int epoll, leave; /* `wait` is to end: the loop has something to do */
    char incoming[READ_BYTES];
};

static PyObject *n_data_received, *n_receive, *n_eof_received, *n_pause_writing, *n_resume_writing, *n_connection_lost,
    *n_connection_made, *n_call_soon, *n_end, *n_call_exception_handler, *n_close, *n_fileno;

/* Tell the kernel which events count now: none for one that is neither read nor waits to be written, its end included. A
   stream that is watched is kept. -1: it cannot be watched (errno). */
static int watch_if_possible(Stream *stream) {
    unsigned int wanted = (stream->reading ? EPOLLIN : 0) | (stream->unsent || stream->connecting ? EPOLLOUT : 0);
    if (stream->lost) wanted = 0;
    unsigned int before = stream->watched;
    if (wanted == before) return 0;
    struct epoll_event event = {.events = wanted, .data.ptr = stream};
    int what = !before ? EPOLL_CTL_ADD : wanted ? EPOLL_CTL_MOD : EPOLL_CTL_DEL;
    int failed = epoll_ctl(stream->streams->epoll, what, stream->fd, &event);
    if (failed && wanted) return -1;
    stream->watched = wanted;
    if (!before) Py_INCREF(stream);
    if (!wanted) Py_DECREF(stream);
    return 0;
}

static void lose_by(Stream *stream, int number);

static void watch(Stream *stream) {
    if (watch_if_possible(stream)) lose_by(stream, errno);
}

/* The end, told in the loop's next turn. `why`: an exception or NULL, borrowed. */
static void lose(Stream *stream, PyObject *why) {
    if (stream->lost) return;
    Py_INCREF(stream);
    stream->lost = stream->closing = 1;
    stream->reading = 0;
    stream->unsent = 0;
    watch(stream);
    PyObject *none = PyList_New(0), *end = PyObject_GetAttr((PyObject *)stream, n_end);
    if (none) Py_SETREF(stream->pieces, none);
    PyObject *given[] = {stream->streams->loop, end, why ? why : Py_None};
    PyObject *handle = none && end ? PyObject_VectorcallMethod(n_call_soon, given, 3, NULL) : NULL;
    if (!handle) PyErr_WriteUnraisable((PyObject *)stream); /* the loop is closed: nobody is there to be told */
    Py_XDECREF(handle);
    Py_XDECREF(end);
    Py_DECREF(stream);
}

static void lose_by(Stream *stream, int number) {
    PyObject *why = PyObject_CallFunction(PyExc_OSError, "is", number, strerror(number));
    if (!why) PyErr_Clear();
    lose(stream, why);
    Py_XDECREF(why);
}

/* A protocol made a mistake: the loop's handler hears of it, and the connection ends, as with asyncio's transports. */
static void report(Stream *stream) {
    PyObject *why = take_raised();
    PyObject *told = Py_BuildValue("{s:s,s:O,s:O,s:O}", "message", "a protocol failed", "exception", why ? why : Py_None,
                                   "transport", stream, "protocol", stream->protocol);
    PyObject *done = told ? PyObject_CallMethodOneArg(stream->streams->loop, n_call_exception_handler, told) : NULL;
    if (!done) PyErr_WriteUnraisable((PyObject *)stream);
    Py_XDECREF(done);
    Py_XDECREF(told);
    lose(stream, why);
    Py_XDECREF(why);
}

/* Call the protocol; its mistakes are reported. */
static PyObject *tell(Stream *stream, PyObject *name, PyObject *what) {
    PyObject *protocol = Py_NewRef(stream->protocol);
    PyObject *done = what ? PyObject_CallMethodOneArg(protocol, name, what) : PyObject_CallMethodNoArgs(protocol, name);
    Py_DECREF(protocol);
    if (!done) report(stream);
    return done;
}

/* The two hot system calls go past libc, whose wrappers look twice each time whether the thread is cancelled: this one never is.
   Together that is a hundredth of a request. */

/* -- output ---------------------------------------------------------------------------------------------------------------- */

/* Something is left over. */
static void keep_waiting(Stream *stream) {
    watch(stream);
    if (stream->unsent > stream->high && !stream->told_to_pause) {
        stream->told_to_pause = 1;
        Py_XDECREF(tell(stream, n_pause_writing, NULL));
    }
}

/* One system call of what waits. -1: an exception. */
static int send_some(Stream *stream) {
    struct iovec parts[PIECES];
    Py_buffer views[PIECES];
    int count = 0;
    Py_ssize_t size = 0, all = PyList_GET_SIZE(stream->pieces), skip = stream->first;
    while (count < all && count < PIECES && size < SEND_BYTES) {
        Py_buffer *view = &views[count];
        if (PyObject_GetBuffer(PyList_GET_ITEM(stream->pieces, count), view, PyBUF_SIMPLE)) break;
        parts[count].iov_base = (char *)view->buf + skip;
        parts[count].iov_len = view->len - skip;
        skip = 0;
        if (size + (Py_ssize_t)parts[count].iov_len > SEND_BYTES) parts[count].iov_len = SEND_BYTES - size;
        size += parts[count++].iov_len;
    }
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = count};
    ssize_t sent = PyErr_Occurred() ? 0 : sendmsg(stream->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    int number = errno, whole = 0;
    stream->first += sent > 0 ? sent : 0;
    while (whole < count && stream->first >= views[whole].len) stream->first -= views[whole++].len;
    while (count) PyBuffer_Release(&views[--count]);
    if (PyErr_Occurred()) return -1;
    if (sent < 0) {
        if (number != EAGAIN && number != EINTR) lose_by(stream, number);
        return 0;
    }
    stream->unsent -= sent;
    return whole ? PyList_SetSlice(stream->pieces, 0, whole, NULL) : 0;
}

/* `piece` waits, with `size` bytes left. What may be resized is held by a view: it keeps its size as long. */
static int append(Stream *stream, PyObject *piece, Py_ssize_t size) {
    PyObject *fixed = PyBytes_CheckExact(piece) ? Py_NewRef(piece) : PyMemoryView_FromObject(piece);
    int failed = !fixed || PyList_Append(stream->pieces, fixed);
    Py_XDECREF(fixed);
    if (!failed) stream->unsent += size;
    return failed ? -1 : 0;
}

/* 1: what is written now is dropped, as after any end; 0: it is sent; -1: an exception. */
static int refuses_writes(Stream *stream) {
    if (!stream->eof_written || stream->closing) return stream->closing;
    PyErr_SetString(PyExc_RuntimeError, "write() after write_eof()");
    return -1;
}

int stream_write(Stream *stream, const char *data, Py_ssize_t size, PyObject *owner) {
    if (stream->closing || stream->eof_written) return refuses_writes(stream) < 0 ? -1 : 0;
    if (size == 0) return 0;
    ssize_t sent = 0;
    if (!stream->unsent) {
        Py_ssize_t most = size < SEND_BYTES ? size : SEND_BYTES;
        sent = syscall(SYS_sendto, stream->fd, data, most, MSG_DONTWAIT | MSG_NOSIGNAL, NULL, 0);
        if (sent == size) return 0;
        if (sent < 0) {
            if (errno != EAGAIN && errno != EINTR) {
                lose_by(stream, errno);
                return 0;
            }
            sent = 0;
        }
        stream->first = owner ? sent : 0;
    }
    PyObject *piece = owner ? Py_NewRef(owner) : PyBytes_FromStringAndSize(data + sent, size - sent);
    int failed = !piece || append(stream, piece, size - sent);
    Py_XDECREF(piece);
    if (failed) return -1;
    keep_waiting(stream);
    return 0;
}

int stream_write_both(Stream *stream, PyObject *head, PyObject *body) {
    if (stream->closing || stream->eof_written) return refuses_writes(stream) < 0 ? -1 : 0;
    Py_ssize_t first = PyBytes_GET_SIZE(head), second = PyBytes_GET_SIZE(body);
    ssize_t sent = 0;
    if (!stream->unsent) {
        Py_ssize_t most = second < SEND_BYTES ? second : SEND_BYTES;
        struct iovec parts[] = {{PyBytes_AS_STRING(head), first}, {PyBytes_AS_STRING(body), most}};
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
        sent = sendmsg(stream->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent == first + second) return 0;
        if (sent < 0) {
            if (errno != EAGAIN && errno != EINTR) {
                lose_by(stream, errno);
                return 0;
            }
            sent = 0;
        }
        stream->first = sent < first ? sent : sent - first;
    }
    if (sent < first && append(stream, head, first - sent)) return -1;
    if (append(stream, body, sent < first ? second : second - (sent - first))) return -1;
    keep_waiting(stream);
    return 0;
}

static PyObject *py_write(PyObject *self, PyObject *data) {
    Py_buffer view;
    if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)) return NULL;
    int failed = stream_write((Stream *)self, view.buf, view.len, data);
    PyBuffer_Release(&view);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

static PyObject *py_writelines(PyObject *self, PyObject *lines) {
    Stream *stream = (Stream *)self;
    int refused = refuses_writes(stream);
    if (refused) return refused < 0 ? NULL : Py_NewRef(Py_None);
    PyObject *all = PySequence_Fast(lines, "writelines() wants a sequence");
    if (!all) return NULL;
    Py_ssize_t before = stream->unsent, count = PyList_GET_SIZE(stream->pieces);
    int failed = 0;
    if (!before) stream->first = 0;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(all) && !failed; i++) {
        PyObject *piece = PySequence_Fast_GET_ITEM(all, i);
        Py_buffer view;
        failed = PyObject_GetBuffer(piece, &view, PyBUF_SIMPLE);
        if (failed) break;
        if (view.len) failed = append(stream, piece, view.len);
        PyBuffer_Release(&view);
    }
    Py_DECREF(all);
    if (failed && !stream->lost) { /* then none of them is written */
        stream->unsent = before;
        PyList_SetSlice(stream->pieces, count, PY_SSIZE_T_MAX, NULL);
    }
    if (!failed && !before && stream->unsent) failed = send_some(stream);
    if (failed) return NULL;
    if (stream->unsent) keep_waiting(stream);
    Py_RETURN_NONE;
}

static void on_writable(Stream *stream) {
    if (send_some(stream)) report(stream);
    if (!stream->unsent && stream->told_to_pause && !stream->lost) {
        stream->told_to_pause = 0;
        Py_XDECREF(tell(stream, n_resume_writing, NULL)); /* which may write again */
    }
    if (!stream->unsent && stream->closing) lose(stream, NULL);
    else if (!stream->unsent && stream->eof_written) shutdown(stream->fd, SHUT_WR);
    watch(stream);
}

/* -- input ----------------------------------------------------------------------------------------------------------------- */

static void finish(Stream *stream) { /* as transport.close */
    if (stream->closing) return;
    stream->closing = 1;
    stream->reading = 0;
    if (stream->unsent) watch(stream);
    else lose(stream, NULL);
}

static void on_readable(Stream *stream) {
    char *incoming = stream->streams->incoming;
    ssize_t size = syscall(SYS_recvfrom, stream->fd, incoming, READ_BYTES, MSG_DONTWAIT, NULL, NULL);
    if (size > 0) {
        PyObject *protocol = Py_NewRef(stream->protocol);
        int where = lane_takes(protocol, incoming, size, &stream->last);
        Py_DECREF(protocol);
        if (where < 0) report(stream);
        if (where == TAKEN || where < 0) return;
        PyObject *data = PyBytes_FromStringAndSize(incoming, size);
        if (data) Py_XDECREF(tell(stream, where == ALL ? n_data_received : n_receive, data));
        else report(stream);
        Py_XDECREF(data);
    } else if (size == 0) {
        stream->eof_read = 1;
        stream->reading = 0;
        watch(stream);
        PyObject *answer = tell(stream, n_eof_received, NULL);
        int stays = answer ? PyObject_IsTrue(answer) : 0;
        Py_XDECREF(answer);
        if (stays < 0) report(stream);
        else if (!stays) finish(stream);
    } else if (errno != EAGAIN && errno != EINTR) {
        lose_by(stream, errno);
    }
}

/* The kernel has an answer to connect(2). Reading begins with `resume_reading`: the protocol may be changed until then. */
static void on_connected(Stream *stream) {
    int number = 0;
    socklen_t size = sizeof number;
    if (getsockopt(stream->fd, SOL_SOCKET, SO_ERROR, &number, &size)) number = errno;
    if (number) {
        lose_by(stream, number);
        return;
    }
    stream->connecting = 0;
    watch(stream);
    Py_XDECREF(tell(stream, n_connection_made, (PyObject *)stream));
}

/* -- a stream as Python sees it -------------------------------------------------------------------------------------------- */

static PyObject *py_is_closing(PyObject *self, PyObject *nothing) { return PyBool_FromLong(((Stream *)self)->closing); }

static PyObject *py_get_write_buffer_size(PyObject *self, PyObject *nothing) {
    return PyLong_FromSsize_t(((Stream *)self)->unsent);
}

static PyObject *py_set_write_buffer_limits(PyObject *self, PyObject *given, PyObject *named) {
    static char *names[] = {"high", NULL};
    Py_ssize_t high;
    if (!PyArg_ParseTupleAndKeywords(given, named, "n", names, &high)) return NULL;
    ((Stream *)self)->high = high;
    Py_RETURN_NONE;
}

static PyObject *py_close(PyObject *self, PyObject *nothing) {
    finish((Stream *)self);
    Py_RETURN_NONE;
}

static PyObject *py_abort(PyObject *self, PyObject *nothing) {
    lose((Stream *)self, NULL);
    Py_RETURN_NONE;
}

static PyObject *py_can_write_eof(PyObject *self, PyObject *nothing) { Py_RETURN_TRUE; }

static PyObject *py_write_eof(PyObject *self, PyObject *nothing) {
    Stream *stream = (Stream *)self;
    if (!stream->closing && !stream->eof_written) {
        stream->eof_written = 1;
        if (!stream->unsent) shutdown(stream->fd, SHUT_WR);
    }
    Py_RETURN_NONE;
}

static PyObject *set_reading(Stream *stream, int reading) {
    if (!stream->closing && !stream->eof_read) {
        stream->reading = reading;
        watch(stream);
    }
    Py_RETURN_NONE;
}

static PyObject *py_pause_reading(PyObject *self, PyObject *nothing) { return set_reading((Stream *)self, 0); }

static PyObject *py_resume_reading(PyObject *self, PyObject *nothing) { return set_reading((Stream *)self, 1); }

static PyObject *py_set_protocol(PyObject *self, PyObject *protocol) {
    Py_SETREF(((Stream *)self)->protocol, Py_NewRef(protocol));
    Py_RETURN_NONE;
}

static PyObject *py_get_extra_info(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    if (count < 1 || count > 2 || !PyUnicode_Check(given[0]))
        return PyErr_Format(PyExc_TypeError, "get_extra_info(name: str, default=None)");
    Stream *stream = (Stream *)self;
    if (!PyUnicode_CompareWithASCIIString(given[0], "socket")) return Py_NewRef(stream->socket);
    if (!PyUnicode_CompareWithASCIIString(given[0], "peername")) return Py_NewRef(stream->peer);
    return Py_NewRef(count == 2 ? given[1] : Py_None);
}

static PyObject *py_end(PyObject *self, PyObject *why) {
    Stream *stream = (Stream *)self;
    Py_XDECREF(tell(stream, n_connection_lost, why));
    Py_SETREF(stream->protocol, Py_NewRef(Py_None));
    return PyObject_CallMethodNoArgs(stream->socket, n_close);
}

static int stream_traverse(PyObject *self, visitproc visit, void *arg) {
    Stream *stream = (Stream *)self;
    Py_VISIT(stream->streams);
    Py_VISIT(stream->protocol);
    Py_VISIT(stream->socket);
    Py_VISIT(stream->peer);
    Py_VISIT(stream->pieces);
    return 0;
}

static int stream_clear(PyObject *self) {
    Stream *stream = (Stream *)self;
    if (stream->protocol) Py_SETREF(stream->protocol, Py_NewRef(Py_None));
    return 0;
}

static void stream_dealloc(PyObject *self) {
    Stream *stream = (Stream *)self;
    PyObject_GC_UnTrack(self);
    Py_XDECREF(stream->streams);
    Py_XDECREF(stream->protocol);
    Py_XDECREF(stream->socket);
    Py_XDECREF(stream->peer);
    Py_XDECREF(stream->pieces);
    Py_XDECREF(stream->last.key);
    PyObject_GC_Del(self);
}

static PyMethodDef stream_methods[] = {
    {"write", py_write, METH_O, NULL}, {"writelines", py_writelines, METH_O, NULL},
    {"is_closing", py_is_closing, METH_NOARGS, NULL}, {"get_write_buffer_size", py_get_write_buffer_size, METH_NOARGS, NULL},
    {"set_write_buffer_limits", (PyCFunction)(void (*)(void))py_set_write_buffer_limits, METH_VARARGS | METH_KEYWORDS, NULL},
    {"close", py_close, METH_NOARGS, NULL}, {"abort", py_abort, METH_NOARGS, NULL},
    {"can_write_eof", py_can_write_eof, METH_NOARGS, NULL}, {"write_eof", py_write_eof, METH_NOARGS, NULL},
    {"pause_reading", py_pause_reading, METH_NOARGS, NULL}, {"resume_reading", py_resume_reading, METH_NOARGS, NULL},
    {"set_protocol", py_set_protocol, METH_O, NULL},
    {"get_extra_info", (PyCFunction)(void (*)(void))py_get_extra_info, METH_FASTCALL, NULL},
    {"_end", py_end, METH_O, "The loop's next turn after the end: the protocol hears of it."},
    {NULL, NULL, 0, NULL},
};

PyTypeObject StreamType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "laya.net.native_lane.Stream",
    .tp_doc = "One connected socket: an asyncio.Transport. Made by Streams.open.",
    .tp_basicsize = sizeof(Stream),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_methods = stream_methods,
    .tp_traverse = stream_traverse,
    .tp_clear = stream_clear,
    .tp_dealloc = stream_dealloc,
};

/* -- all streams of a loop ------------------------------------------------------------------------------------------------- */

static PyObject *streams_new(PyTypeObject *class, PyObject *given, PyObject *named) {
    PyObject *loop;
    int files = -1;
    if (!PyArg_ParseTuple(given, "O|i", &loop, &files)) return NULL;
    Streams *streams = (Streams *)class->tp_alloc(class, 0);
    if (!streams) return NULL;
    streams->loop = Py_NewRef(loop);
    streams->epoll = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
    if (streams->epoll < 0 || (files >= 0 && epoll_ctl(streams->epoll, EPOLL_CTL_ADD, files, &event))) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(streams);
        return NULL;
    }
    return (PyObject *)streams;
}

static PyObject *py_open(PyObject *self, PyObject *given) {
    PyObject *socket, *protocol, *peer;
    int connecting;
    if (!PyArg_ParseTuple(given, "OOOp", &socket, &protocol, &peer, &connecting)) return NULL;
    PyObject *number = PyObject_CallMethodNoArgs(socket, n_fileno);
    if (!number) return NULL;
    long fd = PyLong_AsLong(number);
    Py_DECREF(number);
    if (fd < 0) return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "the socket is closed");
    Stream *stream = PyObject_GC_New(Stream, &StreamType);
    if (!stream) return NULL;
    memset((char *)stream + sizeof(PyObject), 0, sizeof(Stream) - sizeof(PyObject));
    stream->streams = (Streams *)Py_NewRef(self);
    stream->protocol = Py_NewRef(protocol);
    stream->socket = Py_NewRef(socket);
    stream->peer = Py_NewRef(peer);
    stream->pieces = PyList_New(0);
    stream->high = 64 * 1024;
    stream->fd = (int)fd;
    stream->connecting = (char)connecting;
    stream->reading = !connecting;
    PyObject_GC_Track(stream);
    if (!stream->pieces) {
        Py_DECREF(stream);
        return NULL;
    }
    if (watch_if_possible(stream)) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(stream);
        return NULL;
    }
    if (!connecting) Py_XDECREF(tell(stream, n_connection_made, (PyObject *)stream));
    return (PyObject *)stream;
}

static void on_event(Stream *stream, unsigned int what) {
    int failed = what & (EPOLLERR | EPOLLHUP); /* told unasked: the system call finds out what it is */
    if (stream->connecting) on_connected(stream);
    if (stream->reading && (what & EPOLLIN || failed)) on_readable(stream);
    if (stream->unsent && (what & EPOLLOUT || failed)) on_writable(stream);
}

/* Tell the streams. 1: the loop's own files have something too. */
static int hand_out(struct epoll_event *events, int count) {
    int files = 0;
    for (int i = 0; i < count; i++) Py_XINCREF(events[i].data.ptr); /* one may end another */
    for (int i = 0; i < count; i++) {
        if (events[i].data.ptr) on_event(events[i].data.ptr, events[i].events);
        else files = 1;
        Py_XDECREF(events[i].data.ptr);
        if (i % EVENTS_UNDISTURBED == EVENTS_UNDISTURBED - 1) {
            Py_BEGIN_ALLOW_THREADS
            Py_END_ALLOW_THREADS
        }
    }
    return files;
}

static PyObject *py_run(PyObject *self, PyObject *nothing) {
    struct epoll_event events[EVENTS];
    for (int done = 0, count; done < EVENTS; done += count) {
        count = epoll_wait(((Streams *)self)->epoll, events, EVENTS, 0);
        if (count <= 0) break;
        hand_out(events, count);
    }
    Py_RETURN_NONE;
}

static PyObject *py_wait(PyObject *self, PyObject *given) {
    Streams *streams = (Streams *)self;
    double left = given == Py_None ? LONGEST_WAIT : PyFloat_AsDouble(given);
    if (PyErr_Occurred()) return NULL;
    left = left < 0 ? 0 : left > LONGEST_WAIT ? LONGEST_WAIT : left;
    double until = left > 0 ? monotonic() + left : 0;
    int files = 0, done = 0;
    streams->leave = 0;
    do {
        struct epoll_event events[EVENTS];
        int count = 0;
        for (int looks = left > 0 ? LOOKS : 1; looks > 0 && count == 0; looks--)
            count = epoll_wait(streams->epoll, events, EVENTS, 0);
        if (count == 0 && left > 0) {
            Py_BEGIN_ALLOW_THREADS
            count = epoll_wait(streams->epoll, events, EVENTS, (int)ceil(left * 1e3));
            Py_END_ALLOW_THREADS
        }
        if (count < 0 && errno != EINTR) return PyErr_SetFromErrno(PyExc_OSError);
        if (count <= 0) break; /* late enough, or a signal, which the interpreter looks for when we are back */
        files = hand_out(events, count);
        done += count;
        if (left > 0) left = until - monotonic();
    } while (left > 0 && !files && !streams->leave && done < EVENTS);
    return PyBool_FromLong(files);
}

static PyObject *py_leave(PyObject *self, PyObject *nothing) {
    ((Streams *)self)->leave = 1;
    Py_RETURN_NONE;
}

static PyObject *py_fileno(PyObject *self, PyObject *nothing) { return PyLong_FromLong(((Streams *)self)->epoll); }

static PyObject *streams_close(PyObject *self, PyObject *nothing) {
    Streams *streams = (Streams *)self;
    if (streams->epoll >= 0) close(streams->epoll);
    streams->epoll = -1;
    Py_RETURN_NONE;
}

static int streams_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(((Streams *)self)->loop);
    return 0;
}

static int streams_clear(PyObject *self) {
    Py_XSETREF(((Streams *)self)->loop, Py_NewRef(Py_None)); /* a stream may still look for it */
    return 0;
}

static void streams_dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    if (((Streams *)self)->epoll >= 0) close(((Streams *)self)->epoll);
    Py_XDECREF(((Streams *)self)->loop);
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef streams_methods[] = {
    {"open", py_open, METH_VARARGS,
     "open(socket, protocol, peername, connecting) -> Stream: on the loop from now on, and owner of the socket. One that is\n"
     "connecting is paused when it is connected."},
    {"wait", py_wait, METH_O,
     "wait(timeout: float | None) -> whether the loop's own files have something. Streams are served meanwhile."},
    {"leave", py_leave, METH_NOARGS, "`wait` ends when the streams that have something now are served."},
    {"run", py_run, METH_NOARGS, "What came for any stream, as far as one turn of the loop goes."},
    {"fileno", py_fileno, METH_NOARGS, "Readable when `run` has something to do."},
    {"close", streams_close, METH_NOARGS, "Nothing is read any more."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject StreamsType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "laya.net.native_lane.Streams",
    .tp_doc = "Streams(loop, files=-1): the sockets of one loop. `files`: what is readable when a file of the loop's own is.",
    .tp_basicsize = sizeof(Streams),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = streams_new,
    .tp_methods = streams_methods,
    .tp_traverse = streams_traverse,
    .tp_clear = streams_clear,
    .tp_dealloc = streams_dealloc,
};

int add_streams(PyObject *module) {
    static const struct {
        PyObject **name;
        const char *text;
    } names[] = {
        {&n_data_received, "data_received"}, {&n_receive, "receive"}, {&n_eof_received, "eof_received"},
        {&n_pause_writing, "pause_writing"}, {&n_resume_writing, "resume_writing"}, {&n_connection_lost, "connection_lost"},
        {&n_connection_made, "connection_made"}, {&n_call_soon, "call_soon"}, {&n_end, "_end"},
        {&n_call_exception_handler, "call_exception_handler"}, {&n_close, "close"}, {&n_fileno, "fileno"}, {NULL, NULL},
    };
    for (int i = 0; names[i].name; i++)
        if (!(*names[i].name = PyUnicode_InternFromString(names[i].text))) return -1;
    if (PyModule_AddType(module, &StreamType)) return -1;
    return PyModule_AddType(module, &StreamsType);
}
#endif
