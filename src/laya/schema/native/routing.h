/* The members that decide where a request goes, found in one pass over its body.

   In: bytes. Out: (model, stream) where the body is one JSON object, valid in every byte, whose top level names `model` exactly
   once, in plain letters and with a plain string, and `stream` at most once, with true, false or null. None for anything else:
   it is not judged here, `laya.schema.fields` reads it again and has the words for what is wrong. So this reads a subset of what
   that accepts, and must agree on it: tests/schema/test_routing_scan.py compares the two on made and on mutated bodies. One kind
   is taken here alone: where another key came twice, Python cannot see that what looks like a second `model`, or like one spelled
   with escapes, stood in the value that was lost, and refuses the body to be safe.

   `spans_in` follows a large body in the same way and says where its members stand, for `laya.schema.pieces`.

   The grammar is RFC 8259's. Strings are searched 16 bytes at a time for what can end them or is forbidden; bytes from 0x80
   are passed over in them, as msgspec does where it skips a value. */

#ifndef LAYA_ROUTING_H
#define LAYA_ROUTING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <strings.h>
#ifdef __SSE2__
#include <immintrin.h>
#endif

#define MAX_DEPTH 64       /* deeper bodies are read by msgspec, which has a bound of its own */
#define MAX_NAME_BYTES 512 /* no model has a longer name */
#define LONG_STRING 64     /* bytes of a string from which on blocks of 64 are worth their set-up */

typedef const unsigned char *At;

/* Where something ended, or NULL: not valid, or not for us. */
static At value(At p, At end, int depth);

static inline At blank(At p, At end) {
    while (p < end && (*p == ' ' || *p == '\n' || *p == '\r' || *p == '\t')) p++;
    return p;
}

static int hex(At p) {
    int code = 0;
    for (int i = 0; i < 4; i++) {
        unsigned char c = p[i], low = c | 0x20;
        if (c >= '0' && c <= '9') code = code << 4 | (c - '0');
        else if (low >= 'a' && low <= 'f') code = code << 4 | (low - 'a' + 10);
        else return -1;
    }
    return code;
}

static inline int is_plain_escape(unsigned char c) {
    switch (c) {
    case '"': case '\\': case '/': case 'b': case 'f': case 'n': case 'r': case 't': return 1;
    default: return 0;
    }
}

/* `p` is at a backslash. Of surrogates only whole pairs are valid. */
static At escape(At p, At end) {
    if (end - p < 2) return NULL;
    if (p[1] != 'u') return is_plain_escape(p[1]) ? p + 2 : NULL;
    int code = end - p < 6 ? -1 : hex(p + 2);
    if (code < 0 || (code >= 0xDC00 && code <= 0xDFFF)) return NULL;
    if (code < 0xD800 || code > 0xDBFF) return p + 6;
    if (end - p < 12 || p[6] != '\\' || p[7] != 'u') return NULL;
    code = hex(p + 8);
    return code >= 0xDC00 && code <= 0xDFFF ? p + 12 : NULL;
}

#ifdef __SSE2__
/* Which bytes of two vectors have their highest bit set, as 64 bits. */
#define BITS(low, high) ((uint32_t)_mm256_movemask_epi8(low) | (uint64_t)(uint32_t)_mm256_movemask_epi8(high) << 32)
#define EQUAL(letter) BITS(_mm256_cmpeq_epi8(low, _mm256_set1_epi8(letter)), _mm256_cmpeq_epi8(high, _mm256_set1_epi8(letter)))

/* The letters that may follow a backslash and are not `u`: looked up by both halves of a byte, which share a bit if it is one. */
__attribute__((target("avx2"))) static inline __m256i plain_escapes(__m256i bytes) {
    const __m256i by_low = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 0, 13, 0, 8, 0, 4, 0, 0, 0, 0, 0, 2, 0, 4, 1));
    const __m256i by_high = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 0, 1, 0, 0, 2, 4, 8, 0, 0, 0, 0, 0, 0, 0, 0));
    const __m256i half = _mm256_set1_epi8(0x0F);
    __m256i found = _mm256_and_si256(_mm256_shuffle_epi8(by_low, _mm256_and_si256(bytes, half)),
                                     _mm256_shuffle_epi8(by_high, _mm256_and_si256(_mm256_srli_epi16(bytes, 4), half)));
    return _mm256_cmpgt_epi8(found, _mm256_setzero_si256());
}

/* As string_end, 64 bytes at a time and without a branch for each escape. Where fewer are left: `p` there, and `ends` unset. */
__attribute__((target("avx2"))) static At long_string_end(At p, At end, int *plain, int *ends) {
    uint64_t carried = 0; /* 1: the last byte of the block before was a backslash that counts */
    while (end - p >= 64) {
        __m256i low = _mm256_loadu_si256((const __m256i *)p), high = _mm256_loadu_si256((const __m256i *)(p + 32));
        uint64_t slashes = EQUAL('\\'), quotes = EQUAL('"'), above = BITS(low, high), escaped = carried, odd = 0;
        const __m256i control = _mm256_set1_epi8(0x1F);
        uint64_t stops = BITS(_mm256_cmpeq_epi8(_mm256_min_epu8(low, control), low),
                              _mm256_cmpeq_epi8(_mm256_min_epu8(high, control), high));
        carried = 0;
        if (slashes) { /* each second one of a run escapes what follows: simdjson's subtraction (Langdale, Lemire: Parsing
                          gigabytes of JSON per second, 2019) */
            const uint64_t alternate = 0xAAAAAAAAAAAAAAAA;
            uint64_t first = slashes & ~escaped, codes = (((first << 1) | alternate) - first) ^ alternate;
            carried = (codes & slashes) >> 63;
            escaped = codes ^ (slashes | escaped);
        }
        if (escaped) odd = escaped & ~BITS(plain_escapes(low), plain_escapes(high));
        stops |= (quotes & ~escaped) | odd;
        uint64_t before = stops ? (stops & -stops) - 1 : ~0ull;
        if ((above | escaped | slashes) & before) *plain = 0;
        if (!stops) {
            p += 64;
            continue;
        }
        p += __builtin_ctzll(stops);
        *ends = 1;
        if (!(odd & stops & -stops)) return *p == '"' ? p : NULL;
        if (!(p = escape(p - 1, end))) return NULL;
        *ends = 0;
        carried = 0;
    }
    return p - carried;
}
#endif

/* `p` is behind a string's first quote; its last quote. `plain` is cleared where an escape or a byte from 0x80 was passed. */
static At string_end(At p, At end, int *plain) {
#ifdef __SSE2__
    const __m128i quote = _mm_set1_epi8('"'), slash = _mm_set1_epi8('\\'), control = _mm_set1_epi8(0x1F);
    At far = end - p >= LONG_STRING + 64 && __builtin_cpu_supports("avx2") ? p + LONG_STRING : NULL;
#endif
    for (;;) {
#ifdef __SSE2__
        int found = 0;
        if (far && far - p < 16) {
            int ends = 0;
            p = long_string_end(p, end, plain, &ends);
            if (ends || !p) return p;
            far = NULL;
        }
        for (At last = far ? far : end; last - p >= 16 && !found;) {
            __m128i bytes = _mm_loadu_si128((const __m128i *)p);
            __m128i odd = _mm_or_si128(_mm_cmpeq_epi8(bytes, quote), _mm_cmpeq_epi8(bytes, slash));
            odd = _mm_or_si128(odd, _mm_cmpeq_epi8(_mm_min_epu8(bytes, control), bytes));
            int high = _mm_movemask_epi8(bytes), at = 16;
            if ((found = _mm_movemask_epi8(odd))) at = __builtin_ctz(found);
            if (high & ((1 << at) - 1)) *plain = 0;
            p += at;
        }
        if (far && !found) continue;
#endif
        while (p < end && *p != '"' && *p != '\\' && *p >= 0x20) {
            if (*p >= 0x80) *plain = 0;
            p++;
        }
        if (p >= end || *p < 0x20) return NULL;
        if (*p == '"') return p;
        *plain = 0;
        if (!(p = escape(p, end))) return NULL;
    }
}

static At digits(At p, At end) {
    At first = p;
    while (p < end && *p >= '0' && *p <= '9') p++;
    return p > first ? p : NULL;
}

static At number(At p, At end) {
    if (*p == '-') p++;
    if (p >= end) return NULL;
    if (*p == '0') p++;
    else if (!(p = digits(p, end))) return NULL;
    if (p < end && *p == '.' && !(p = digits(p + 1, end))) return NULL;
    if (p < end && (*p | 0x20) == 'e') {
        p++;
        if (p < end && (*p == '+' || *p == '-')) p++;
        p = digits(p, end);
    }
    return p;
}

static At word(At p, At end, const char *text, size_t length) {
    return (size_t)(end - p) >= length && !memcmp(p, text, length) ? p + length : NULL;
}

/* `p` is behind the bracket. */
static At array(At p, At end, int depth) {
    p = blank(p, end);
    if (p < end && *p == ']') return p + 1;
    for (;;) {
        if (!(p = value(p, end, depth))) return NULL;
        p = blank(p, end);
        if (p >= end) return NULL;
        if (*p == ']') return p + 1;
        if (*p++ != ',') return NULL;
        p = blank(p, end);
    }
}

/* The colon behind a key that ends at `p`, and the blanks around it. */
static At colon(At p, At end) {
    p = blank(p + 1, end);
    return p < end && *p == ':' ? blank(p + 1, end) : NULL;
}

/* `p` is behind the brace. */
static At object(At p, At end, int depth) {
    int plain;
    p = blank(p, end);
    if (p < end && *p == '}') return p + 1;
    for (;;) {
        if (p >= end || *p != '"' || !(p = string_end(p + 1, end, &plain)) || !(p = colon(p, end))) return NULL;
        if (!(p = value(p, end, depth))) return NULL;
        p = blank(p, end);
        if (p >= end) return NULL;
        if (*p == '}') return p + 1;
        if (*p++ != ',') return NULL;
        p = blank(p, end);
    }
}

static At value(At p, At end, int depth) {
    int plain;
    if (p >= end || depth >= MAX_DEPTH) return NULL;
    switch (*p) {
    case '"': return (p = string_end(p + 1, end, &plain)) ? p + 1 : NULL;
    case '{': return object(p + 1, end, depth + 1);
    case '[': return array(p + 1, end, depth + 1);
    case 't': return word(p, end, "true", 4);
    case 'f': return word(p, end, "false", 5);
    case 'n': return word(p, end, "null", 4);
    default: return *p == '-' || (*p >= '0' && *p <= '9') ? number(p, end) : NULL;
    }
}

typedef struct {
    At model;
    Py_ssize_t model_bytes;
    unsigned char stream; /* 0: not met, else the first letter of its value */
} Found;

/* The value of a top-level member whose key is `key`, `length` bytes of plain text. */
static At member(At p, At end, At key, Py_ssize_t length, Found *found) {
    if (length == 5 && !strncasecmp((const char *)key, "model", 5)) {
        int plain = 1;
        if (found->model || memcmp(key, "model", 5) || p >= end || *p != '"') return NULL;
        found->model = p + 1;
        if (!(p = string_end(p + 1, end, &plain)) || !plain) return NULL;
        found->model_bytes = p - found->model;
        return found->model_bytes <= MAX_NAME_BYTES ? p + 1 : NULL;
    }
    if (length == 6 && !memcmp(key, "stream", 6)) {
        if (found->stream || p >= end || !memchr("tfn", *p, 3)) return NULL;
        found->stream = *p;
    }
    return value(p, end, 1);
}

/* 1: judged; 0: not. */
static int members(At p, At end, Found *found) {
    p = blank(p, end);
    if (p >= end || *p != '{') return 0;
    p = blank(p + 1, end);
    for (;;) {
        int plain = 1;
        At key = p + 1;
        if (p >= end || *p != '"' || !(p = string_end(key, end, &plain)) || !plain) return 0;
        Py_ssize_t length = p - key;
        if (!(p = colon(p, end)) || !(p = member(p, end, key, length, found))) return 0;
        p = blank(p, end);
        if (p >= end) return 0;
        if (*p == '}') return found->model && blank(p + 1, end) == end;
        if (*p++ != ',') return 0;
        p = blank(p, end);
    }
}

typedef struct {
    Py_ssize_t key, key_end, value, value_end; /* offsets; the key's quotes included */
} Span;

/* Where the members of one whole object stand, repeated ones too: how many, or -1: not valid, too many, or a key too long. */
static inline Py_ssize_t spans_in(At body, At end, Span *spans, Py_ssize_t most, Py_ssize_t longest_key) {
    int plain;
    At p = blank(body, end);
    if (p >= end || *p != '{') return -1;
    p = blank(p + 1, end);
    for (Py_ssize_t count = 0;;) {
        if (p >= end || *p != '"' || count == most) return -1;
        Span *span = spans + count++;
        span->key = p - body;
        if (!(p = string_end(p + 1, end, &plain))) return -1;
        span->key_end = p + 1 - body;
        if (span->key_end - span->key > longest_key || !(p = colon(p, end))) return -1;
        span->value = p - body;
        if (!(p = value(p, end, 1))) return -1;
        span->value_end = p - body;
        p = blank(p, end);
        if (p >= end) return -1;
        if (*p == '}') return blank(p + 1, end) == end ? count : -1;
        if (*p++ != ',') return -1;
        p = blank(p, end);
    }
}

/* (model, stream) as new and borrowed references; 0: not judged; -1: an exception. */
static int routing_of(const char *body, Py_ssize_t length, PyObject **model, PyObject **stream) {
    Found found = {0};
    if (!members((At)body, (At)body + length, &found)) return 0;
    *stream = found.stream == 't' ? Py_True : found.stream == 'f' ? Py_False : Py_None;
    *model = PyUnicode_FromStringAndSize((const char *)found.model, found.model_bytes);
    return *model ? 1 : -1;
}

#endif
