/* The fast lane in C: `ask` and `reply` of laya/net/lane.py, which says what they do and why, and is the reference; that of
   `pass_frame` is the long way itself.

   Each step looks first, and answers False (go the long way) while nothing has been changed. Where it has begun to change
   things an exception is passed on: the exchange is on its connection by then, and the caller ends it. What is rare (a new
   lane, a balancer's choice, a full pool) is done in Python. tests/gateway/test_lane.py runs both. */

#define _GNU_SOURCE /* memmem */
#include <time.h>

#include "../../schema/native/routing.h"
#include "../../wire/native/whole.h"
#include "slots.h"
#include "streams.h"

#define CONTRACT 5 /* as in_c.py has it */
#define JOINED_BELOW 2048 /* bytes of a body that is copied behind its head; a longer one is a second part of one system call */

static Py_ssize_t c_inbound, c_server, c_gateway, c_exchange, c_held, c_in_head, c_keep_alive, c_head_only, c_chunked,
    c_deadline, c_transport, c_peer, p_buffer, p_phase, p_fast, p_tries_fast, o_method, o_keep_alive, o_started,
    o_informational, b_request_heads, b_response_heads, b_max_head, b_max_body, q_memo, q_method, r_memo, r_status,
    r_keep_alive, m_plan, m_lines, m_is_stream, h_owner, h_lanes, f_model, f_stream, f_body, f_members, f_span, d_held,
    d_limit, k_open_until, k_failures, l_route, l_name, l_candidates, l_legs, l_only, g_candidate, g_name, g_pool, g_breaker,
    g_head, g_lines, g_counted, g_who, g_patience, g_clock, g_limits, g_routing, g_waiting, g_requests, u_gone, u_transport,
    u_outbound, u_call, u_in_body, u_deadline, u_reused, u_paused, a_pool, a_listener, a_method, a_head, a_body, a_connection,
    a_in_one_step, a_done, a_deadline, a_fresh_only, t_bounds, t_counts, t_total, c_paused, c_closing, p_pending, p_failure,
    p_body, x_left, x_held, x_authority, w_tail, e_gateway, e_connection, e_request, e_body, e_plan, e_request_id, e_began,
    e_fields, e_rule, e_route, e_targets, e_model, e_target, e_backend, e_leg, e_state, e_call, e_sent_at, e_first_at,
    e_status, j_idle, j_inflight, j_waiting, j_retired, j_connected, j_connecting, n_now, v_settings, v_ledger, v_limits,
    v_draining, y_table, y_staging, y_selection, y_log, y_watchers, y_recent, y_run, y_count, z_caching, s_info_on, s_lines;

static const Slot SLOTS[] = {
    {"ClientConnection", "inbound", &c_inbound}, {"ClientConnection", "server", &c_server},
    {"ClientConnection", "gateway", &c_gateway}, {"ClientConnection", "exchange", &c_exchange},
    {"ClientConnection", "held", &c_held}, {"ClientConnection", "in_head", &c_in_head},
    {"ClientConnection", "keep_alive", &c_keep_alive}, {"ClientConnection", "head_only", &c_head_only},
    {"ClientConnection", "chunked", &c_chunked}, {"ClientConnection", "deadline", &c_deadline},
    {"ClientConnection", "transport", &c_transport}, {"ClientConnection", "peer", &c_peer}, {"Inbound", "buffer", &p_buffer},
    {"Inbound", "phase", &p_phase}, {"Inbound", "fast", &p_fast}, {"Inbound", "tries_fast", &p_tries_fast},
    {"Outbound", "method", &o_method}, {"Outbound", "keep_alive", &o_keep_alive}, {"Outbound", "started", &o_started},
    {"Outbound", "informational", &o_informational}, {"Limits", "request_heads", &b_request_heads},
    {"Limits", "response_heads", &b_response_heads}, {"Limits", "max_head_bytes", &b_max_head},
    {"Limits", "max_body_bytes", &b_max_body}, {"Request", "memo", &q_memo}, {"Request", "method", &q_method},
    {"Response", "memo", &r_memo}, {"Response", "status", &r_status}, {"Response", "keep_alive", &r_keep_alive},
    {"Memo", "plan", &m_plan}, {"Memo", "lines", &m_lines}, {"Memo", "is_stream", &m_is_stream},
    {"HeadPlan", "owner", &h_owner}, {"HeadPlan", "lanes", &h_lanes},
    {"RoutingFields", "model", &f_model}, {"RoutingFields", "stream", &f_stream}, {"RoutingFields", "_body", &f_body},
    {"RoutingFields", "_members", &f_members}, {"RoutingFields", "span", &f_span}, {"Ledger", "held", &d_held},
    {"Ledger", "limit", &d_limit}, {"Breaker", "open_until", &k_open_until}, {"Breaker", "failures", &k_failures},
    {"Lane", "route", &l_route}, {"Lane", "name", &l_name}, {"Lane", "candidates", &l_candidates}, {"Lane", "legs", &l_legs},
    {"Lane", "only", &l_only}, {"Leg", "candidate", &g_candidate}, {"Leg", "name", &g_name}, {"Leg", "pool", &g_pool},
    {"Leg", "breaker", &g_breaker}, {"Leg", "head", &g_head}, {"Leg", "lines", &g_lines}, {"Leg", "counted", &g_counted},
    {"Leg", "who", &g_who}, {"Leg", "patience", &g_patience}, {"Leg", "clock", &g_clock}, {"Leg", "limits", &g_limits},
    {"Leg", "routing", &g_routing}, {"Leg", "waiting", &g_waiting}, {"Leg", "requests", &g_requests},
    {"UpstreamConnection", "gone", &u_gone}, {"UpstreamConnection", "transport", &u_transport},
    {"UpstreamConnection", "outbound", &u_outbound}, {"UpstreamConnection", "call", &u_call},
    {"UpstreamConnection", "in_body", &u_in_body}, {"UpstreamConnection", "deadline", &u_deadline},
    {"UpstreamConnection", "reused", &u_reused}, {"UpstreamConnection", "paused", &u_paused}, {"Call", "pool", &a_pool},
    {"Call", "listener", &a_listener}, {"Call", "method", &a_method}, {"Call", "head", &a_head}, {"Call", "body", &a_body},
    {"Call", "connection", &a_connection}, {"Call", "in_one_step", &a_in_one_step}, {"Call", "done", &a_done},
    {"Call", "deadline", &a_deadline}, {"Call", "fresh_only", &a_fresh_only}, {"Histogram", "bounds", &t_bounds},
    {"Histogram", "counts", &t_counts}, {"Histogram", "total", &t_total}, {"ClientConnection", "paused", &c_paused},
    {"ClientConnection", "closing", &c_closing},
    {"Outbound", "_pending", &p_pending}, {"Outbound", "_failure", &p_failure}, {"Outbound", "_body", &p_body},
    {"ChunkedBody", "_left", &x_left}, {"ChunkedBody", "_held", &x_held}, {"ChunkedBody", "_authority", &x_authority},
    {"StreamWatch", "_tail", &w_tail},
    {"LaneExchange", "gateway", &e_gateway}, {"LaneExchange", "connection", &e_connection},
    {"LaneExchange", "request", &e_request}, {"LaneExchange", "body", &e_body}, {"LaneExchange", "plan", &e_plan},
    {"LaneExchange", "request_id", &e_request_id}, {"LaneExchange", "began", &e_began},
    {"LaneExchange", "fields", &e_fields}, {"LaneExchange", "rule", &e_rule}, {"LaneExchange", "route", &e_route},
    {"LaneExchange", "targets", &e_targets}, {"LaneExchange", "model", &e_model}, {"LaneExchange", "target", &e_target},
    {"LaneExchange", "backend", &e_backend}, {"LaneExchange", "leg", &e_leg}, {"LaneExchange", "state", &e_state},
    {"LaneExchange", "call", &e_call}, {"LaneExchange", "sent_at", &e_sent_at}, {"LaneExchange", "first_at", &e_first_at},
    {"LaneExchange", "status", &e_status}, {"Pool", "idle", &j_idle}, {"Pool", "inflight", &j_inflight},
    {"Pool", "waiting", &j_waiting}, {"Pool", "retired", &j_retired}, {"Pool", "connected", &j_connected},
    {"Pool", "connecting", &j_connecting}, {"Clock", "now", &n_now},
    {"ServerState", "settings", &v_settings}, {"ServerState", "ledger", &v_ledger}, {"ServerState", "limits", &v_limits},
    {"ServerState", "draining", &v_draining}, {"Gateway", "table", &y_table}, {"Gateway", "staging", &y_staging},
    {"Gateway", "selection", &y_selection}, {"Gateway", "log", &y_log}, {"Gateway", "watchers", &y_watchers},
    {"Gateway", "recent", &y_recent}, {"Gateway", "run", &y_run}, {"Gateway", "count", &y_count},
    {"Staging", "caching", &z_caching}, {"Log", "info_on", &s_info_on}, {"Log", "lines", &s_lines},
    {NULL, NULL, NULL},
};

/* What `prepare` gives: classes, the long way's functions, and the room's numbers. */
#define GIVEN(X) X(ClientConnection) X(Inbound) X(Outbound) X(Limits) X(Request) X(Response) X(HeadPlan) X(RoutingFields) \
    X(Ledger) X(Breaker) X(Lane) X(Leg) X(UpstreamConnection) X(Call) X(Histogram) X(LaneExchange) X(Clock) X(Pool) \
    X(ServerState) X(Gateway) X(Staging) X(Log) X(BATCH) \
    X(lane_of) X(named) X(is_stream) X(WAITING) X(DONE) X(NEVER) X(READ_ON_LOOP) X(JOIN_BELOW) X(IDLE_S) X(QUEUE_S) \
    X(PHASE_HEAD) X(PHASE_BODY) X(PHASE_DONE) X(ChunkedBody) X(StreamWatch) X(STREAMING) X(WATCH_TAIL) X(LARGE_READ) \
    X(watcher)
/* Attributes of classes without __slots__. */
#define NAMED(X) X(clock) X(now) X(settings) X(keepalive_timeout_s) X(turn) X(choose) X(append) X(join) X(max_inflight) X(_grow) \
    X(send) X(give_back) X(write) X(writelines) X(is_closing) X(get_write_buffer_size) X(_sse) X(_rename) \
    X(_partial) X(_watch) X(hold_back) X(see) X(idle_timeout_s) X(on_fault) X(popleft) X(knows) X(_begin) X(fault)
#define DECLARE(name) static PyObject *G_##name;
GIVEN(DECLARE)
#undef DECLARE
#define DECLARE(name) static PyObject *N_##name;
NAMED(DECLARE)
#undef DECLARE

static PyObject *self_reply, *zero, *nought, *two_hundred, *nothing;
#define at_head G_PHASE_HEAD
#define at_done G_PHASE_DONE
static Py_ssize_t read_on_loop, join_below, watch_tail, large_read, batch;
static double idle_s, queue_s;

#define IS(object, class) ((object) && Py_TYPE(object) == (PyTypeObject *)G_##class)
#define IS_A(object, class) ((object) && PyObject_TypeCheck(object, (PyTypeObject *)G_##class))

/* An attribute that its owner keeps while we look at it; NULL: an exception. */
static PyObject *kept(PyObject *owner, PyObject *name) {
    PyObject *found = owner ? PyObject_GetAttr(owner, name) : NULL;
    Py_XDECREF(found);
    return found;
}

double monotonic(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)((long long)at.tv_sec * 1000000000 + at.tv_nsec) / 1e9;
}

/* `name` becomes `value`, whose reference is taken. -1: an exception. */
static int give(PyObject *object, PyObject *name, PyObject *value) {
    int failed = value ? PyObject_SetAttr(object, name, value) : -1;
    Py_XDECREF(value);
    return failed;
}

static int put_new(PyObject *object, Py_ssize_t offset, PyObject *value) {
    if (!value) return -1;
    put(object, offset, value);
    return 0;
}

static int add(PyObject *object, Py_ssize_t offset, long by) {
    return put_new(object, offset, PyLong_FromLong(PyLong_AsLong(AT(object, offset)) + by));
}

/* The result of a call, which nobody wants. -1: an exception. */
static int done_with(PyObject *result) {
    Py_XDECREF(result);
    return result ? 0 : -1;
}

/* -1: an exception. */
static int is_true(PyObject *result) {
    int truth = result ? PyObject_IsTrue(result) : -1;
    Py_XDECREF(result);
    return truth;
}

static int observe(PyObject *histogram, double seconds) {
    if (!IS(histogram, Histogram)) return done_with(PyErr_Format(PyExc_TypeError, "no histogram of ours"));
    PyObject *bounds = AT(histogram, t_bounds), *counts = AT(histogram, t_counts);
    Py_ssize_t bucket = 0, count = PyTuple_GET_SIZE(bounds);
    while (bucket < count && PyFloat_AS_DOUBLE(PyTuple_GET_ITEM(bounds, bucket)) < seconds) bucket++;
    PyObject *more = PyLong_FromLongLong(PyLong_AsLongLong(PyList_GET_ITEM(counts, bucket)) + 1);
    if (!more || PyList_SetItem(counts, bucket, more)) return -1;
    return put_new(histogram, t_total, PyFloat_FromDouble(PyFloat_AsDouble(AT(histogram, t_total)) + seconds));
}

static int count_request(PyObject *requests, PyObject *labels) {
    PyObject *before = requests ? PyDict_GetItemWithError(requests, labels) : NULL;
    if (!before && PyErr_Occurred()) return -1;
    PyObject *more = PyLong_FromLongLong((before ? PyLong_AsLongLong(before) : 0) + 1);
    int failed = more ? PyDict_SetItem(requests, labels, more) : -1;
    Py_XDECREF(more);
    return failed;
}

/* A parser between messages, which reads the common ones itself. */
static int is_between(PyObject *parser, PyObject *phase) {
    return AT(parser, p_phase) == phase && AT(parser, p_fast) == Py_True && PyBytes_GET_SIZE(AT(parser, p_buffer)) == 0;
}

static int find_in(const char *data, Py_ssize_t size, PyObject *limits, Py_ssize_t heads, Whole *found, Last *last) {
    Py_ssize_t max_head = PyLong_AsSsize_t(AT(limits, b_max_head));
    return find_whole(data, size, AT(limits, heads), max_head, PyLong_AsLongLong(AT(limits, b_max_body)), found, last);
}

/* -1: an exception. */
static int write_to(PyObject *transport, PyObject *data) {
    Stream *stream = AS_STREAM(transport);
    if (stream) return stream_write(stream, PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data), data);
    return done_with(PyObject_CallMethodOneArg(transport, N_write, data));
}

/* -1: an exception. */
static int is_closing(PyObject *transport) {
    Stream *stream = AS_STREAM(transport);
    return stream ? stream->closing : is_true(PyObject_CallMethodNoArgs(transport, N_is_closing));
}

/* -- the request ----------------------------------------------------------------------------------------------------------- */

/* The lane of a model's name, borrowed from the plan; NULL: none, or an exception. */
static PyObject *find_lane(PyObject *gateway, PyObject *request, PyObject *plan, PyObject *model) {
    PyObject *lane = PyDict_GetItemWithError(AT(plan, h_lanes), model);
    if (lane || PyErr_Occurred()) return lane;
    PyObject *given[] = {gateway, request, plan, model};
    lane = PyObject_Vectorcall(G_lane_of, given, 4, NULL); /* which keeps it in the plan */
    Py_XDECREF(lane);
    return lane == Py_None ? NULL : lane;
}

static PyObject *fields_of(PyObject *model, PyObject *stream, PyObject *body) {
    PyTypeObject *class = (PyTypeObject *)G_RoutingFields;
    PyObject *fields = class->tp_alloc(class, 0);
    if (!fields) return NULL;
    set(fields, f_model, model);
    set(fields, f_stream, stream);
    set(fields, f_body, body);
    set(fields, f_members, Py_None);
    set(fields, f_span, Py_None);
    return fields;
}

static char *append(char *to, const char *from, Py_ssize_t length) {
    memcpy(to, from, length);
    return to + length;
}

static char *append_bytes(char *to, PyObject *bytes) {
    return append(to, PyBytes_AS_STRING(bytes), PyBytes_GET_SIZE(bytes));
}

/* At least `width` digits in base 10 or 16; snprintf takes five times as long. */
static char *append_number(char *to, unsigned long long number, int base, int width) {
    char digits[24], *p = digits + sizeof digits;
    do {
        *--p = "0123456789abcdef"[number % base];
        number /= base;
    } while (number || digits + sizeof digits - p < width);
    return append(to, p, digits + sizeof digits - p);
}

/* As Gateway.new_request_id. */
static PyObject *new_request_id(PyObject *gateway) {
    PyObject *run = AT(gateway, y_run), *next = PyIter_Next(AT(gateway, y_count));
    if (!next) return NULL;
    char id[64], *to = append_number(append_bytes(id, run), PyLong_AsUnsignedLongLong(next), 16, 8);
    Py_DECREF(next);
    return PyBytes_FromStringAndSize(id, to - id);
}

static const char ID[] = "x-request-id: ";
enum { ID_BYTES = sizeof ID - 1 };

/* The request's head, and `body` behind it where `joined`. */
static PyObject *message_of(PyObject *leg, PyObject *request_id, PyObject *body, int joined) {
    PyObject *head = AT(leg, g_head);
    char framing[64];
    Py_ssize_t length = PyBytes_GET_SIZE(body);
    char *end = append(append_number(append(framing, "\r\ncontent-length: ", 18), length, 10, 1), "\r\n\r\n", 4);
    Py_ssize_t size = PyBytes_GET_SIZE(head) + ID_BYTES + PyBytes_GET_SIZE(request_id) + (end - framing);
    if (joined) size += length;
    PyObject *message = PyBytes_FromStringAndSize(NULL, size);
    if (!message) return NULL;
    char *to = append(append_bytes(PyBytes_AS_STRING(message), head), ID, ID_BYTES);
    to = append(append_bytes(to, request_id), framing, end - framing);
    if (joined) append_bytes(to, body);
    return message;
}

static PyObject *call_of(PyObject *pool, PyObject *exchange, PyObject *method, PyObject *message, PyObject *body) {
    PyTypeObject *class = (PyTypeObject *)G_Call;
    PyObject *call = class->tp_alloc(class, 0);
    if (!call) return NULL;
    set(call, a_pool, pool);
    set(call, a_listener, exchange);
    set(call, a_method, method);
    set(call, a_head, message);
    set(call, a_body, body);
    set(call, a_connection, Py_None);
    set(call, a_in_one_step, self_reply);
    set(call, a_done, Py_False);
    set(call, a_deadline, zero);
    set(call, a_fresh_only, Py_False);
    return call;
}

/* As UpstreamConnection.send. -1: an exception. */
static int send_on(PyObject *upstream, PyObject *call, PyObject *leg, PyObject *body, int joined) {
    PyObject *outbound = AT(upstream, u_outbound), *transport = AT(upstream, u_transport);
    if (!IS(outbound, Outbound) || AT(outbound, p_phase) != at_done || PyBytes_GET_SIZE(AT(outbound, p_buffer)))
        return done_with(PyObject_CallMethodOneArg(upstream, N_send, call));
    PyObject *now = AT(AT(leg, g_clock), n_now);
    double until = PyFloat_AsDouble(now) + PyFloat_AsDouble(AT(leg, g_patience));
    set(upstream, u_call, call);
    set(upstream, u_in_body, Py_False);
    if (put_new(upstream, u_deadline, PyFloat_FromDouble(until))) return -1;
    set(call, a_connection, upstream);
    set(outbound, p_phase, at_head);
    set(outbound, p_fast, AT(outbound, p_tries_fast));
    set(outbound, o_method, AT(call, a_method));
    set(outbound, o_informational, zero);
    set(outbound, o_started, Py_False);
    PyObject *message = AT(call, a_head);
    if (joined) return write_to(transport, message);
    if (AS_STREAM(transport)) return stream_write_both(AS_STREAM(transport), message, body);
    PyObject *both = PyTuple_Pack(2, message, body);
    int failed = both ? done_with(PyObject_CallMethodOneArg(transport, N_writelines, both)) : -1;
    Py_XDECREF(both);
    return failed;
}

typedef struct { /* of one request; borrowed but for those that `let_go` gives back */
    PyObject *connection, *inbound, *server, *gateway, *ledger, *request, *plan, *lane, *leg, *pool, *idle;
    PyObject *model, *stream, *candidates, *upstream, *body, *fields, *request_id;
    double began;
} Asked;

static void let_go(Asked *asked) {
    Py_CLEAR(asked->model);
    Py_CLEAR(asked->candidates);
    Py_CLEAR(asked->upstream);
    Py_CLEAR(asked->body);
    Py_CLEAR(asked->fields);
    Py_CLEAR(asked->request_id);
}

/* The long way chooses, and counts it. -1: an exception. */
static int turn_back(PyObject *selection) {
    PyObject *turn = kept(selection, N_turn);
    return turn ? give(selection, N_turn, PyLong_FromLong(PyLong_AsLong(turn) - 1)) : -1;
}

/* Where the request goes. 1: there; 0: the long way; -1: an exception. */
static int find_leg(Asked *asked) {
    asked->lane = find_lane(asked->gateway, asked->request, asked->plan, asked->model);
    if (!IS(asked->lane, Lane)) return PyErr_Occurred() ? -1 : 0;
    asked->began = monotonic();
    asked->leg = AT(asked->lane, l_only);
    PyObject *selection = AT(asked->gateway, y_selection);
    int chosen = asked->leg == Py_None;
    if (chosen) {
        asked->candidates = PyObject_CallMethodOneArg(selection, N_choose, AT(asked->lane, l_route));
        if (!asked->candidates) return -1;
        PyObject *best = PyList_GetItem(asked->candidates, 0);
        asked->leg = best ? PyDict_GetItemWithError(AT(asked->lane, l_legs), best) : NULL;
    } else {
        asked->candidates = Py_NewRef(AT(asked->lane, l_candidates));
    }
    if (!IS(asked->leg, Leg) || !IS(AT(asked->leg, g_breaker), Breaker)) return PyErr_Occurred() ? -1 : 0;
    asked->pool = AT(asked->leg, g_pool);
    if (!IS(asked->pool, Pool) || !IS(AT(asked->leg, g_clock), Clock)) return 0;
    asked->idle = AT(asked->pool, j_idle);
    if (!PyList_CheckExact(asked->idle)) return 0;
    Py_ssize_t idle = PyList_GET_SIZE(asked->idle);
    int busy = 0;
    if (idle) {
        asked->upstream = Py_NewRef(PyList_GET_ITEM(asked->idle, idle - 1));
        if (!IS(asked->upstream, UpstreamConnection)) return 0;
        busy = AT(asked->upstream, u_gone) == Py_True;
        if (!busy) busy = is_closing(AT(asked->upstream, u_transport));
        if (busy < 0) return -1;
    }
    int open = PyObject_IsTrue(AT(AT(asked->leg, g_breaker), k_open_until));
    if (open < 0) return -1;
    if (busy || open) return chosen ? turn_back(selection) : 0;
    return 1;
}

/* The exchange that the long way would have made, on its connection. -1: an exception. */
static int begin(Asked *asked, Py_ssize_t length) {
    PyTypeObject *class = (PyTypeObject *)G_LaneExchange;
    PyObject *exchange = class->tp_alloc(class, 0);
    if (!exchange) return -1;
    PyObject *connection = asked->connection, *leg = asked->leg, *lane = asked->lane;
    PyObject *began = PyFloat_FromDouble(asked->began);
    if (began) put(exchange, e_began, began);
    set(exchange, e_gateway, asked->gateway);
    set(exchange, e_connection, connection);
    set(exchange, e_request, asked->request);
    set(exchange, e_body, asked->body);
    set(exchange, e_plan, asked->plan);
    set(exchange, e_request_id, asked->request_id);
    set(exchange, e_fields, asked->fields);
    set(exchange, e_rule, AT(lane, l_route));
    set(exchange, e_route, AT(lane, l_name));
    set(exchange, e_targets, asked->candidates);
    set(exchange, e_model, asked->model);
    set(exchange, e_target, AT(leg, g_candidate));
    set(exchange, e_backend, AT(leg, g_name));
    set(exchange, e_leg, leg);
    set(exchange, e_state, G_WAITING);
    set(exchange, e_first_at, nought);
    set(exchange, e_status, zero);
    PyObject *held = began ? PyLong_FromSsize_t(length) : NULL;
    PyObject *all = held ? PyLong_FromSsize_t(PyLong_AsSsize_t(AT(asked->ledger, d_held)) + length) : NULL;
    if (!all) {
        Py_XDECREF(held);
        Py_DECREF(exchange);
        return -1;
    }
    put(asked->ledger, d_held, all);
    put(connection, c_held, held);
    set(connection, c_in_head, Py_False);
    set(connection, c_keep_alive, Py_True);
    set(connection, c_head_only, Py_False);
    set(connection, c_chunked, Py_True);
    set(connection, c_deadline, G_NEVER);
    set(asked->inbound, p_phase, at_done);
    put(connection, c_exchange, exchange);
    return 0;
}

/* As Pool.line_up. -1: an exception. */
static int line_up(PyObject *pool, PyObject *call, PyObject *leg) {
    double until = PyFloat_AsDouble(AT(AT(leg, g_clock), n_now)) + queue_s;
    if (put_new(call, a_deadline, PyFloat_FromDouble(until))) return -1;
    if (done_with(PyObject_CallMethodOneArg(AT(pool, j_waiting), N_append, call))) return -1;
    PyObject *most = kept(kept(pool, N_settings), N_max_inflight);
    if (!most) return -1;
    if (PyLong_AsLong(AT(pool, j_connected)) + PyLong_AsLong(AT(pool, j_connecting)) >= PyLong_AsLong(most)) return 0;
    return done_with(PyObject_CallMethodNoArgs(pool, N__grow));
}

/* -1: an exception. */
static int send_out(Asked *asked, Py_ssize_t length) {
    PyObject *exchange = Py_NewRef(AT(asked->connection, c_exchange));
    int joined = length < JOINED_BELOW, failed = -1;
    PyObject *message = message_of(asked->leg, asked->request_id, asked->body, joined);
    PyObject *call = NULL;
    if (message) call = call_of(asked->pool, exchange, AT(asked->request, q_method), message, joined ? nothing : asked->body);
    double sent_at = monotonic();
    if (call) set(exchange, e_call, call);
    if (call && !put_new(exchange, e_sent_at, PyFloat_FromDouble(sent_at)) && !add(asked->pool, j_inflight, 1)) {
        if (!asked->upstream) {
            failed = line_up(asked->pool, call, asked->leg);
        } else {
            Py_ssize_t idle = PyList_GET_SIZE(asked->idle);
            failed = PyList_SetSlice(asked->idle, idle - 1, idle, NULL)
                || send_on(asked->upstream, call, asked->leg, asked->body, joined);
        }
    }
    if (!failed) failed = observe(AT(asked->leg, g_routing), sent_at - asked->began);
    Py_XDECREF(message);
    Py_XDECREF(call);
    Py_DECREF(exchange);
    return failed;
}

/* 1: the cache had the answer to this body, and it was given; 0: it has none; -1: an exception. */
static int answer_known(PyObject *caching, const Asked *asked, const Whole *found) {
    PyObject *connection = asked->connection, *request = asked->request;
    PyObject *body = PyBytes_FromStringAndSize(found->body, found->length);
    Py_INCREF(caching); /* a reload may let go of it, the memo of the request */
    Py_INCREF(request);
    PyObject *asking[] = {caching, asked->plan, body}, *beginning[] = {connection, request, body};
    int known = body ? is_true(PyObject_VectorcallMethod(N_knows, asking, 3, NULL)) : -1;
    if (known > 0) {
        set(asked->inbound, p_phase, at_done);
        if (done_with(PyObject_VectorcallMethod(N__begin, beginning, 3, NULL))) known = -1;
    }
    Py_DECREF(request);
    Py_DECREF(caching);
    Py_XDECREF(body);
    return known;
}

/* 1: the request is on its way; 0: the long way; -1: an exception. */
static int take_request(PyObject *connection, const char *data, Py_ssize_t size, Last *last) {
    Asked asked = {.connection = connection, .inbound = AT(connection, c_inbound)};
    if (size > read_on_loop || !IS(asked.inbound, Inbound) || !is_between(asked.inbound, at_head)) return 0;
    asked.server = AT(connection, c_server);
    asked.gateway = AT(connection, c_gateway);
    if (!IS_A(asked.server, ServerState) || !IS(asked.gateway, Gateway)) return 0;
    PyObject *limits = AT(asked.server, v_limits), *staging = AT(asked.gateway, y_staging);
    asked.ledger = AT(asked.server, v_ledger);
    if (!IS(limits, Limits) || !IS(asked.ledger, Ledger) || !IS(staging, Staging)) return 0;
    if (!IS(AT(asked.gateway, y_log), Log)) return 0;
    Whole found;
    int known = find_in(data, size, limits, b_request_heads, &found, last);
    if (known <= 0) return known;
    if (!IS(found.message, Request) || !found.length) return 0;
    asked.request = found.message;
    asked.plan = AT(AT(asked.request, q_memo), m_plan);
    if (!IS(asked.plan, HeadPlan)) return 0;
    PyObject *caching = AT(staging, z_caching);
    if (AT(asked.plan, h_owner) != AT(asked.gateway, y_table)) return 0;
    if (caching != Py_None) {
        int answered = answer_known(caching, &asked, &found);
        if (answered) return answered;
    }
    if (PyLong_AsSsize_t(AT(asked.ledger, d_held)) + found.length > PyLong_AsSsize_t(AT(asked.ledger, d_limit))) return 0;
    int there = routing_of(found.body, found.length, &asked.model, &asked.stream);
    if (there > 0) there = find_leg(&asked);
    if (there > 0) {
        asked.body = PyBytes_FromStringAndSize(found.body, found.length);
        asked.fields = asked.body ? fields_of(asked.model, asked.stream, asked.body) : NULL;
        asked.request_id = asked.fields ? new_request_id(asked.gateway) : NULL;
        if (!asked.request_id || begin(&asked, found.length) || send_out(&asked, found.length)) there = -1;
    }
    let_go(&asked);
    return there;
}

/* -- the answer ------------------------------------------------------------------------------------------------------------ */

static const char DAYS[] = "SunMonTueWedThuFriSat", MONTHS[] = "JanFebMarAprMayJunJulAugSepOctNovDec";

/* The time of now as HTTP and as the log have it, made anew once a second. */
static struct {
    time_t second;
    char http[96], iso[96];
} stamp;

static long look_at_clock(void) { /* milliseconds within the second */
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (at.tv_sec != stamp.second) {
        struct tm t;
        gmtime_r(&at.tv_sec, &t);
        stamp.second = at.tv_sec;
        snprintf(stamp.http, sizeof stamp.http, "%.3s, %02d %.3s %04d %02d:%02d:%02d GMT", DAYS + 3 * t.tm_wday, t.tm_mday,
                 MONTHS + 3 * t.tm_mon, t.tm_year + 1900, t.tm_hour, t.tm_min, t.tm_sec);
        snprintf(stamp.iso, sizeof stamp.iso, "%04d-%02d-%02dT%02d:%02d:%02d", t.tm_year + 1900, t.tm_mon + 1, t.tm_mday,
                 t.tm_hour, t.tm_min, t.tm_sec);
    }
    return at.tv_nsec / 1000000;
}

static PyObject *answer_of(PyObject *lines, PyObject *leg, PyObject *request_id, const Whole *found) {
    char head[160], *end = append(append(head, "HTTP/1.1 200 OK\r\ndate: ", 23), stamp.http, 29);
    end = append(append_number(append(end, "\r\ncontent-length: ", 18), found->length, 10, 1), "\r\n", 2);
    PyObject *own = AT(leg, g_lines);
    Py_ssize_t first = end - head, size = first + PyBytes_GET_SIZE(lines) + PyBytes_GET_SIZE(own);
    size += ID_BYTES + PyBytes_GET_SIZE(request_id) + 4 + found->length;
    PyObject *answer = PyBytes_FromStringAndSize(NULL, size);
    if (!answer) return NULL;
    char *to = append(PyBytes_AS_STRING(answer), head, first);
    to = append(append_bytes(append_bytes(to, lines), own), ID, ID_BYTES);
    append(append(append_bytes(to, request_id), "\r\n\r\n", 4), found->body, found->length);
    return answer;
}

/* As laya.log.access_line for an answer of 200. */
static PyObject *line_of(PyObject *request_id, PyObject *who, double seconds, long ms) {
    static const char BEGIN[] = "{\"time\":\"", MIDDLE[] = "Z\",\"level\":\"info\",\"event\":\"request\",\"id\":\"",
                      END[] = ",\"status\":200,\"outcome\":\"ok\",\"seconds\":";
    char begin[96], number[48];
    char *end = append(append(append(begin, BEGIN, sizeof BEGIN - 1), stamp.iso, 19), ".", 1);
    end = append(append_number(end, ms, 10, 3), MIDDLE, sizeof MIDDLE - 1);
    long long micros = (long long)(seconds * 1e6 + 0.5);
    char *stop = append(append_number(number, micros / 1000000, 10, 1), ".", 1);
    stop = append(append_number(stop, micros % 1000000, 10, 6), "}\n", 2);
    Py_ssize_t first = end - begin, last = stop - number;
    Py_ssize_t size = first + PyBytes_GET_SIZE(request_id) + 2 + PyBytes_GET_SIZE(who) + (sizeof END - 1) + last;
    PyObject *line = PyBytes_FromStringAndSize(NULL, size);
    if (!line) return NULL;
    char *to = append_bytes(append(PyBytes_AS_STRING(line), begin, first), request_id);
    to = append(append_bytes(append(to, "\",", 2), who), END, sizeof END - 1);
    append(to, number, last);
    return line;
}

/* As Log.line. -1: an exception. */
static int write_line(PyObject *log, PyObject *line) {
    PyObject *lines = AT(log, s_lines);
    if (done_with(PyObject_CallMethodOneArg(lines, N_append, line))) return -1;
    Py_ssize_t count = PyObject_Size(lines);
    if (count < batch) return count < 0 ? -1 : 0;
    return done_with(PyObject_CallMethodNoArgs(log, N_join));
}

/* As Gateway.finished. -1: an exception. */
static int keep_books(PyObject *gateway, PyObject *exchange, PyObject *leg, PyObject *request_id, double now, long ms) {
    PyObject *sent_at = AT(exchange, e_sent_at), *began = AT(exchange, e_began);
    double seconds = now - PyFloat_AsDouble(began);
    if (observe(AT(leg, g_waiting), now - PyFloat_AsDouble(sent_at))) return -1;
    if (count_request(AT(leg, g_requests), AT(leg, g_counted))) return -1;
    PyObject *log = AT(gateway, y_log);
    int is_logged = AT(log, s_info_on) == Py_True;
    if (!is_logged && !PyObject_IsTrue(AT(gateway, y_watchers))) return 0;
    PyObject *peer = AT(AT(exchange, e_connection), c_peer), *who = PyDict_GetItemWithError(AT(leg, g_who), peer);
    if (who) Py_INCREF(who);
    else if (!PyErr_Occurred()) who = PyObject_CallFunctionObjArgs(G_named, leg, exchange, NULL);
    PyObject *line = who ? line_of(request_id, who, seconds, ms) : NULL;
    int failed = line ? done_with(PyObject_CallMethodOneArg(AT(gateway, y_recent), N_append, line)) : -1;
    if (!failed && is_logged) failed = write_line(log, line);
    Py_XDECREF(line);
    Py_XDECREF(who);
    return failed;
}

/* The connection takes the first call in line, as Pool.give_back does it. -1: an exception. */
static int send_next(PyObject *upstream, PyObject *leg, PyObject *waiting) {
    PyObject *pool = AT(leg, g_pool), *call = PySequence_GetItem(waiting, 0);
    if (!call) return -1;
    PyObject *body = IS(call, Call) ? AT(call, a_body) : Py_None;
    int joined = PyBytes_Check(body) && PyBytes_GET_SIZE(body) == 0, failed;
    if (!PyBytes_Check(body) || (!joined && PyBytes_GET_SIZE(body) < join_below) || AT(call, a_fresh_only) != Py_False) {
        failed = done_with(PyObject_CallMethodOneArg(pool, N_give_back, upstream));
    } else {
        failed = add(pool, j_inflight, -1) || done_with(PyObject_CallMethodNoArgs(waiting, N_popleft))
            || send_on(upstream, call, leg, body, joined);
    }
    Py_DECREF(call);
    return failed;
}

/* The connection is in its pool again. -1: an exception. */
static int give_back(PyObject *upstream, PyObject *call, PyObject *leg) {
    PyObject *pool = AT(leg, g_pool), *outbound = AT(upstream, u_outbound);
    set(outbound, o_keep_alive, Py_True);
    set(outbound, p_phase, at_done);
    set(call, a_done, Py_True);
    set(upstream, u_call, Py_None);
    set(upstream, u_reused, Py_True);
    PyObject *waiting = AT(pool, j_waiting), *retired = AT(pool, j_retired), *idle = AT(pool, j_idle);
    PyObject *now = AT(AT(leg, g_clock), n_now);
    Py_ssize_t line = PyObject_Size(waiting);
    if (line > 0) return send_next(upstream, leg, waiting);
    if (line < 0 || retired != Py_False) return done_with(PyObject_CallMethodOneArg(pool, N_give_back, upstream));
    double until = PyFloat_AsDouble(now) + idle_s;
    if (add(pool, j_inflight, -1) || put_new(upstream, u_deadline, PyFloat_FromDouble(until))) return -1;
    return PyList_Append(idle, upstream);
}

/* The connection waits for its client's next request. -1: an exception. */
static int go_on(PyObject *connection, PyObject *server, PyObject *ledger, PyObject *leg) {
    PyObject *inbound = AT(connection, c_inbound), *now = AT(AT(leg, g_clock), n_now);
    PyObject *idle_time = kept(AT(server, v_settings), N_keepalive_timeout_s);
    if (!idle_time) return -1;
    Py_ssize_t held = PyLong_AsSsize_t(AT(ledger, d_held)) - PyLong_AsSsize_t(AT(connection, c_held));
    set(connection, c_exchange, Py_None);
    set(inbound, p_phase, at_head);
    set(inbound, p_fast, AT(inbound, p_tries_fast));
    set(connection, c_held, zero);
    if (put_new(ledger, d_held, PyLong_FromSsize_t(held))) return -1;
    return put_new(connection, c_deadline, PyFloat_FromDouble(PyFloat_AsDouble(now) + PyFloat_AsDouble(idle_time)));
}

static int end(PyObject *exchange) {
    set(exchange, e_status, two_hundred);
    set(exchange, e_call, Py_None);
    set(exchange, e_state, G_DONE);
    return 0;
}

/* The whole answer lies in `found`. -1: an exception. */
static int pass_on(PyObject *upstream, PyObject *call, PyObject *exchange, PyObject *leg, PyObject *lines, const Whole *found) {
    PyObject *connection = Py_NewRef(AT(exchange, e_connection)), *gateway = AT(connection, c_gateway);
    PyObject *request_id = Py_NewRef(AT(exchange, e_request_id)), *answer = NULL;
    int failed = -1;
    if (connection && gateway && request_id) {
        PyObject *server = AT(connection, c_server), *ledger = AT(server, v_ledger);
        double now = monotonic();
        long ms = look_at_clock();
        answer = answer_of(lines, leg, request_id, found);
        failed = !answer || give_back(upstream, call, leg)
            || write_to(AT(connection, c_transport), answer)
            || put_new(exchange, e_first_at, PyFloat_FromDouble(now)) || end(exchange)
            || keep_books(gateway, exchange, leg, request_id, now, ms) || go_on(connection, server, ledger, leg);
    }
    Py_XDECREF(answer);
    Py_XDECREF(request_id);
    Py_XDECREF(connection);
    return failed ? -1 : 0;
}

/* 1: the client's connection can take a whole answer and go on; 0: not; -1: an exception. */
static int is_ready(PyObject *connection) {
    if (!IS(connection, ClientConnection) || !IS(AT(connection, c_inbound), Inbound)) return PyErr_Occurred() ? -1 : 0;
    PyObject *server = AT(connection, c_server);
    if (!IS_A(server, ServerState) || !IS(AT(connection, c_gateway), Gateway) || !IS(AT(server, v_ledger), Ledger)) return 0;
    if (!IS(AT(AT(connection, c_gateway), y_log), Log)) return 0;
    return AT(server, v_draining) == Py_False && PyBytes_GET_SIZE(AT(AT(connection, c_inbound), p_buffer)) == 0;
}

/* 1: the backend's connection has sent and taken everything, and stays open; 0: not; -1: an exception. */
static int is_reusable(PyObject *upstream) {
    PyObject *transport = AT(upstream, u_transport);
    Stream *stream = AS_STREAM(transport);
    int busy = stream ? stream->unsent > 0 : is_true(PyObject_CallMethodNoArgs(transport, N_get_write_buffer_size));
    if (!busy) busy = is_closing(transport);
    return busy < 0 ? -1 : !busy;
}

/* -- a frame of a stream --------------------------------------------------------------------------------------------------- */

/* The payload when `data` is exactly one chunk, its size written as ours are, that ends a frame; else NULL. Seven digits are
   more than LARGE_READ has, and fit 32 bits. */
static const char *frame_in(const char *data, Py_ssize_t all, Py_ssize_t *length) {
    const char *p = data, *end = p + all, *first = p;
    Py_ssize_t size = 0;
    for (; p < end && p - first < 7 && ((*p >= '0' && *p <= '9') || (*p >= 'a' && *p <= 'f')); p++)
        size = size << 4 | (*p <= '9' ? *p - '0' : *p - 'a' + 10);
    if (*first == '0' || size < 4 || end - p != size + 4 || p[0] != '\r' || p[1] != '\n' || end[-2] != '\r' || end[-1] != '\n')
        return NULL;
    const char *last = end - 2;
    *length = size;
    int ends = !memcmp(last - 2, "\n\n", 2) || !memcmp(last - 2, "\r\r", 2) || !memcmp(last - 4, "\r\n\r\n", 4);
    return ends ? p + 2 : NULL;
}

/* As StreamWatch.see. -1: an exception. */
static int see(PyObject *watch, const char *payload, Py_ssize_t length) {
    PyObject *tail = AT(watch, w_tail);
    Py_ssize_t size = PyBytes_GET_SIZE(tail);
    int clear = size >= 2 && !memcmp(PyBytes_AS_STRING(tail) + size - 2, "\n\n", 2); /* no mark can lie across the border */
    if (clear && length >= watch_tail && !memmem(payload, length, "[DONE]", 6))
        return put_new(watch, w_tail, PyBytes_FromStringAndSize(payload + length - watch_tail, watch_tail));
    PyObject *seen = PyBytes_FromStringAndSize(payload, length);
    int failed = seen ? done_with(PyObject_CallMethodOneArg(watch, N_see, seen)) : -1;
    Py_XDECREF(seen);
    return failed;
}

/* 1: the chunk went to the client as it came; 0: the long way; -1: an exception. */
static int pass_frame(PyObject *upstream, PyObject *exchange, const char *data, Py_ssize_t size) {
    PyObject *outbound = AT(upstream, u_outbound), *body = IS(outbound, Outbound) ? AT(outbound, p_body) : NULL;
    if (!IS(body, ChunkedBody) || AT(outbound, p_phase) != G_PHASE_BODY || PyBytes_GET_SIZE(AT(outbound, p_buffer))
        || PyBytes_GET_SIZE(AT(outbound, p_pending)) || AT(outbound, p_failure) != Py_None || AT(body, x_left) != zero
        || PyBytes_GET_SIZE(AT(body, x_held)) || AT(body, x_authority) != Py_None || AT(upstream, u_paused) != Py_False)
        return 0;
    Py_ssize_t length;
    const char *payload = size <= large_read ? frame_in(data, size, &length) : NULL;
    if (!payload) return 0;
    PyObject *state = AT(exchange, e_state), *sse = kept(exchange, N__sse), *rename = kept(exchange, N__rename);
    PyObject *partial = kept(exchange, N__partial), *first_at = AT(exchange, e_first_at), *watch = kept(exchange, N__watch);
    PyObject *connection = AT(exchange, e_connection), *pool = NULL;
    if (!sse || !rename || !partial || !watch) return -1;
    if (state != G_STREAMING || sse != Py_True || rename != Py_None || PyBytes_GET_SIZE(partial) || !PyFloat_AsDouble(first_at)
        || !IS(watch, StreamWatch) || !IS(connection, ClientConnection) || AT(connection, c_exchange) != exchange
        || AT(connection, c_chunked) != Py_True || AT(connection, c_head_only) != Py_False
        || AT(connection, c_paused) != Py_False)
        return 0;
    Py_INCREF(exchange);
    Py_INCREF(watch);
    Py_INCREF(connection);
    Stream *stream = AS_STREAM(AT(connection, c_transport));
    PyObject *frame = stream ? NULL : PyBytes_FromStringAndSize(data, size);
    int failed = stream ? stream_write(stream, data, size, NULL) : frame ? write_to(AT(connection, c_transport), frame) : -1;
    Py_XDECREF(frame);
    if (!failed && AT(connection, c_paused) != Py_False) failed = done_with(PyObject_CallMethodNoArgs(exchange, N_hold_back));
    if (!failed) failed = see(watch, payload, length);
    if (!failed && AT(upstream, u_call) != Py_None && AT(upstream, u_paused) == Py_False) {
        pool = AT(AT(upstream, u_call), a_pool);
        PyObject *now = kept(kept(pool, N_clock), N_now), *patience = kept(kept(pool, N_settings), N_idle_timeout_s);
        failed = !now || !patience
            || put_new(upstream, u_deadline, PyFloat_FromDouble(PyFloat_AsDouble(now) + PyFloat_AsDouble(patience)));
    }
    Py_DECREF(connection);
    Py_DECREF(watch);
    Py_DECREF(exchange);
    return failed ? -1 : 1;
}

/* 1: the answer, or a frame of it, is with the client; 0: the long way; -1: an exception. */
static int take_answer(PyObject *upstream, PyObject *call, const char *data, Py_ssize_t size, Last *last) {
    PyObject *exchange = AT(call, a_listener), *outbound = AT(upstream, u_outbound);
    if (!IS(exchange, LaneExchange)) return 0;
    if (AT(upstream, u_in_body) == Py_True) return pass_frame(upstream, exchange, data, size);
    if (!IS(outbound, Outbound) || !is_between(outbound, at_head) || AT(upstream, u_paused) != Py_False) return 0;
    PyObject *state = AT(exchange, e_state), *leg = AT(exchange, e_leg);
    if (state != G_WAITING || !IS(leg, Leg) || !IS(AT(leg, g_limits), Limits)) return 0;
    PyObject *breaker = AT(leg, g_breaker), *limits = AT(leg, g_limits);
    if (!IS(breaker, Breaker) || AT(breaker, k_failures) != zero) return 0;
    Whole found;
    int known = find_in(data, size, limits, b_response_heads, &found, last);
    if (known <= 0) return known;
    if (!IS(found.message, Response) || !found.digits || found.length >= join_below) return 0;
    PyObject *response = found.message, *memo = AT(response, r_memo), *lines = AT(memo, m_lines);
    if (AT(response, r_keep_alive) != Py_True || PyLong_AsLong(AT(response, r_status)) != 200) return 0;
    if (!PyBytes_Check(lines)) return 0; /* None: no answer with this head was passed on yet */
    if (AT(memo, m_is_stream) == Py_None && put_new(memo, m_is_stream, PyObject_CallOneArg(G_is_stream, response))) return -1;
    if (AT(memo, m_is_stream) != Py_False) return 0;
    int ready = is_ready(AT(exchange, e_connection));
    if (ready > 0) ready = is_reusable(upstream);
    if (ready <= 0) return ready;
    Py_INCREF(lines);
    Py_INCREF(leg);
    Py_INCREF(exchange);
    int failed = pass_on(upstream, call, exchange, leg, lines, &found);
    Py_DECREF(exchange);
    Py_DECREF(leg);
    Py_DECREF(lines);
    return failed ? -1 : 1;
}

/* -- the ways in ----------------------------------------------------------------------------------------------------------- */

PyObject *take_raised(void) {
#if PY_VERSION_HEX >= 0x030C0000
    return PyErr_GetRaisedException();
#else
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (value && traceback) PyException_SetTraceback(value, traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return value;
#endif
}

/* Tell who watches. -1: an exception, which was there before or comes from there. */
static int tell_watcher(const char *step, int taken, PyObject *connection) {
    if (G_watcher == Py_None || taken < 0) return taken;
    return done_with(PyObject_CallFunction(G_watcher, "sOO", step, taken ? Py_True : Py_False, connection)) ? -1 : taken;
}

/* As ClientConnection.data_received up to `receive`. */
static int client_takes(PyObject *connection, const char *data, Py_ssize_t size, Last *last) {
    if (AT(connection, c_closing) != Py_False) return TAKEN;
    if (AT(connection, c_exchange) != Py_None || AT(connection, c_paused) != Py_False) return REST;
    int taken = tell_watcher("ask", take_request(connection, data, size, last), connection);
    if (taken >= 0) return taken;
    PyObject *exchange = AT(connection, c_exchange), *fault = take_raised();
    int touched = exchange != Py_None;
    int failed = done_with(touched ? PyObject_CallMethodOneArg(exchange, N_on_fault, fault)
                                   : PyObject_CallMethodOneArg(AT(connection, c_gateway), N_fault, fault));
    Py_XDECREF(fault);
    return failed ? -1 : touched ? TAKEN : REST;
}

/* As UpstreamConnection.data_received up to `receive`. */
static int upstream_takes(PyObject *upstream, const char *data, Py_ssize_t size, Last *last) {
    PyObject *call = AT(upstream, u_call);
    if (!IS(call, Call)) return ALL;
    if (AT(call, a_in_one_step) != self_reply) return AT(call, a_in_one_step) == Py_None ? REST : ALL;
    Py_INCREF(call);
    int taken = tell_watcher("reply", take_answer(upstream, call, data, size, last), upstream);
    if (taken < 0) {
        PyObject *fault = take_raised(), *given[] = {upstream, call, fault};
        taken = done_with(PyObject_VectorcallMethod(N_on_fault, given, 3, NULL)) ? -1 : TAKEN;
        Py_XDECREF(fault);
    }
    Py_DECREF(call);
    return taken;
}

int lane_takes(PyObject *protocol, const char *data, Py_ssize_t size, Last *last) {
    if (IS(protocol, ClientConnection)) return client_takes(protocol, data, size, last);
    return IS(protocol, UpstreamConnection) ? upstream_takes(protocol, data, size, last) : ALL;
}

static PyObject *ask(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    if (count != 2 || !IS(given[0], ClientConnection) || !PyBytes_CheckExact(given[1])) Py_RETURN_FALSE;
    int taken = take_request(given[0], PyBytes_AS_STRING(given[1]), PyBytes_GET_SIZE(given[1]), NULL);
    return taken < 0 ? NULL : PyBool_FromLong(taken);
}

static PyObject *reply(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    if (count != 3 || !IS(given[0], UpstreamConnection) || !IS(given[1], Call) || !PyBytes_CheckExact(given[2]))
        Py_RETURN_FALSE;
    int taken = take_answer(given[0], given[1], PyBytes_AS_STRING(given[2]), PyBytes_GET_SIZE(given[2]), NULL);
    return taken < 0 ? NULL : PyBool_FromLong(taken);
}

/* -- setting up ------------------------------------------------------------------------------------------------------------ */

static PyObject *prepare(PyObject *module, PyObject *given) {
    if (!PyDict_Check(given)) return PyErr_Format(PyExc_TypeError, "prepare(given: dict)");
#define TAKE(name) \
    PyObject *name = PyDict_GetItemString(given, #name); \
    if (!name) return PyErr_Format(PyExc_TypeError, #name " is missing");
    GIVEN(TAKE)
#undef TAKE
    if (resolve(SLOTS, given)) return NULL;
    read_on_loop = PyLong_AsSsize_t(READ_ON_LOOP);
    join_below = PyLong_AsSsize_t(JOIN_BELOW);
    watch_tail = PyLong_AsSsize_t(WATCH_TAIL);
    large_read = PyLong_AsSsize_t(LARGE_READ);
    batch = PyLong_AsSsize_t(BATCH);
    idle_s = PyFloat_AsDouble(IDLE_S);
    queue_s = PyFloat_AsDouble(QUEUE_S);
    if (PyErr_Occurred()) return NULL;
#define KEEP(name) Py_XSETREF(G_##name, Py_NewRef(name));
    GIVEN(KEEP)
#undef KEEP
    Py_XSETREF(self_reply, PyObject_GetAttrString(module, "reply"));
    return self_reply ? Py_NewRef(Py_None) : NULL;
}

static PyMethodDef functions[] = {
    {"ask", (PyCFunction)(void (*)(void))ask, METH_FASTCALL, "As laya.net.lane.ask_in_python."},
    {"reply", (PyCFunction)(void (*)(void))reply, METH_FASTCALL, "As laya.net.lane.reply_in_python."},
    {"prepare", prepare, METH_O, "Take the classes, functions and numbers. Raises TypeError where one is not as expected."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "native_lane", NULL, 0, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_native_lane(void) {
    if (PyInterpreterState_Get() != PyInterpreterState_Main()) /* the classes and names above are those of one interpreter */
        return PyErr_Format(PyExc_ImportError, "only the main interpreter has the lane in C");
#define INTERN(name) if (!(N_##name = PyUnicode_InternFromString(#name))) return NULL;
    NAMED(INTERN)
#undef INTERN
    zero = PyLong_FromLong(0);
    two_hundred = PyLong_FromLong(200);
    nothing = PyBytes_FromStringAndSize(NULL, 0);
    nought = PyFloat_FromDouble(0.0);
    PyObject *module = zero && two_hundred && nothing && nought ? PyModule_Create(&definition) : NULL;
    if (module && (PyModule_AddIntMacro(module, CONTRACT) || add_streams(module))) Py_CLEAR(module);
    return module;
}
