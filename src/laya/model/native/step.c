/* The whole decoder for the rows of one step, in one parallel region: threads take blocks of a product, or rows and heads of
 * attention, from a shared counter, and meet at a barrier between phases. No memory is allocated here. */
#include "step.h"
#include "vectors.h"

#include <math.h>
#include <omp.h>
#include <string.h>
#include <time.h>

#define TILE 96       /* input rows that a block is multiplied with at once: its sums (24 KiB) stay in the first cache */
#define ALONE_ROWS 8  /* up to so many rows each thread prepares a product's input for itself: cheaper than a barrier */
#define APART 8       /* counters of two threads: a cache line */
#define PHASES 6      /* counters of a layer, in the order of use */

static int64_t largest(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t padded(int64_t n) { return (n + 63) & ~(int64_t)63; }

typedef struct {
    const Model *model;
    const Step *step;
    float *qkv, *seen, *gated; /* [rows][...] */
    int64_t *counters;
    float *shared_x;
    Input shared;
    int64_t mark; /* when the last part ended, by the first thread's clock */
} Work;

enum { PRODUCTS, ATTENTION, REST };

/* What was spent since the last call belongs to `part`. */
static void spent(Work *work, int part) {
    if (!work->step->spent || omp_get_thread_num()) return;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    int64_t at = now.tv_sec * 1000000000ll + now.tv_nsec;
    if (work->mark) work->step->spent[part] += at - work->mark;
    work->mark = at;
}

typedef struct {
    float *x; /* a normed row or rows of one's own */
    Input own;
    float *block, *other; /* [TILE][64] */
} Thread;

static int64_t widest(const Model *model) {
    return largest(model->hidden, largest(model->intermediate, model->heads * model->head_dim));
}

static uint8_t *take(uint8_t **free_, int64_t bytes) {
    uint8_t *at = *free_;
    *free_ += padded(bytes);
    return at;
}

static void take_input(Input *input, uint8_t **at, int64_t rows, int64_t width) {
    input->sums_stride = (width + SUM_COLUMNS - 1) / SUM_COLUMNS;
    input->planes_stride = padded(width);
    input->sums = (float *)take(at, rows * input->sums_stride * 4);
    input->high = take(at, rows * input->planes_stride);
    input->low = take(at, rows * input->planes_stride);
    input->steps = (float *)take(at, rows * 4);
}

static int64_t phase_counters(const Work *work) { return work->step->threads * APART; }

static int64_t counter_bytes(const Work *work, int64_t layers) { return layers * PHASES * phase_counters(work) * 8; }

static uint8_t *lay_out(const Model *model, int64_t rows, uint8_t *at, Work *work) {
    work->counters = (int64_t *)take(&at, counter_bytes(work, model->layers));
    work->qkv = (float *)take(&at, rows * (model->heads + 2 * model->kv_heads) * model->head_dim * 4);
    work->seen = (float *)take(&at, rows * model->heads * model->head_dim * 4);
    work->gated = (float *)take(&at, rows * model->intermediate * 4);
    work->shared_x = (float *)take(&at, rows * model->hidden * 4);
    take_input(&work->shared, &at, rows, widest(model));
    return at;
}

static uint8_t *lay_out_thread(const Model *model, uint8_t *at, Thread *thread) {
    thread->x = (float *)take(&at, ALONE_ROWS * model->hidden * 4);
    take_input(&thread->own, &at, ALONE_ROWS, widest(model));
    thread->block = (float *)take(&at, TILE * BLOCK_ROWS * 4);
    thread->other = (float *)take(&at, TILE * BLOCK_ROWS * 4);
    return at;
}

int64_t laya_scratch_bytes(const Model *model, int64_t rows, int64_t threads) {
    Step step = {.threads = threads};
    Work work = {.step = &step};
    Thread thread;
    int64_t shared = lay_out(model, rows, 0, &work) - (uint8_t *)0;
    return shared + threads * (lay_out_thread(model, 0, &thread) - (uint8_t *)0);
}

static void norm(const float *x, const float *weight, int64_t width, double eps, float *out) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t k = 0; k < width; k += LANES) squares = _mm512_fmadd_ps(_mm512_loadu_ps(x + k), _mm512_loadu_ps(x + k), squares);
    __m512 factor = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(squares) + (float)(width * eps)));
    for (int64_t k = 0; k < width; k += LANES)
        _mm512_storeu_ps(out + k, _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x + k), factor), _mm512_loadu_ps(weight + k)));
}

/* The input of a product, seen by this thread: rows of `x`, or of the stream after its norm where there is a `weight`. */
static const Input *prepare(Work *work, Thread *thread, const Linear *linear, const float *x, const float *weight) {
    const Step *step = work->step;
    int64_t rows = step->rows, columns = linear->columns;
    int alone = rows <= ALONE_ROWS;
    Input *input = alone ? &thread->own : &work->shared;
    float *normed = alone ? thread->x : work->shared_x;
    int four = has_bits(linear, 4), eight = has_bits(linear, 8);
    int64_t first = alone ? 0 : omp_get_thread_num(), by = alone ? 1 : omp_get_num_threads();
    if (alone || first == 0) input->x = weight ? normed : x, input->stride = columns;
    Input view = *input;
    view.x = weight ? normed : x, view.stride = columns;
    for (int64_t row = first; row < rows; row += by) {
        if (weight) norm(step->stream + row * step->stream_stride, weight, columns, work->model->eps, normed + row * columns);
        input_row(&view, row, columns, four, eight);
    }
    if (!alone) {
#pragma omp barrier
    }
    return input;
}

/* The next of `units` for this thread, -1 when all are taken. Each thread has a run of its own, so that it reads a matrix from
 * one place to the next, and then helps the others with theirs: one that lost its core holds nobody up. */
static int64_t next(int64_t *counters, int64_t units) {
    int threads = omp_get_num_threads(), own = omp_get_thread_num();
    for (int i = 0; i < threads; i++) {
        int64_t owner = (own + i) % threads, first = units * owner / threads, last = units * (owner + 1) / threads;
        int64_t unit = first + __atomic_fetch_add(counters + owner * APART, 1, __ATOMIC_RELAXED);
        if (unit < last) return unit;
    }
    return -1;
}

static Input from_row(const Input *input, int64_t row) {
    Input view = *input;
    view.x += row * view.stride, view.sums += row * view.sums_stride, view.steps += row;
    view.high += row * view.planes_stride, view.low += row * view.planes_stride;
    return view;
}

/* out[row][n] (+)= the product; `bias` may be null. Rows of the matrix past the last whole block are there with 8 bits alone. */
static void product(Work *work, Thread *thread, const Linear *linear, const Input *input, int64_t *counter, const float *bias,
                    int adds, float *out, int64_t stride) {
    int64_t rows = work->step->rows, tiles = (rows + TILE - 1) / TILE, blocks = (linear->rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    for (int64_t unit; (unit = next(counter, blocks * tiles)) >= 0;) {
        int64_t block = unit / tiles, row = unit % tiles * TILE, count = rows - row < TILE ? rows - row : TILE;
        int64_t column = block * BLOCK_ROWS, width = linear->rows - column < BLOCK_ROWS ? linear->rows - column : BLOCK_ROWS;
        Input view = from_row(input, row);
        linear_block(linear, block, &view, count, thread->block);
        for (int64_t m = 0; m < count; m++)
            for (int64_t n = 0; n < width; n += LANES) {
                __mmask16 there = width - n >= LANES ? 0xffff : (__mmask16)((1u << (width - n)) - 1);
                float *at = out + (row + m) * stride + column + n;
                __m512 number = _mm512_loadu_ps(thread->block + m * BLOCK_ROWS + n);
                if (bias) number = _mm512_add_ps(number, _mm512_maskz_loadu_ps(there, bias + column + n));
                if (adds) number = _mm512_add_ps(number, _mm512_maskz_loadu_ps(there, at));
                _mm512_mask_storeu_ps(at, there, number);
            }
    }
}

/* silu(g) * u, or gelu (by tanh): both are g / (1 + exp(-y)) */
INLINE __m512 gate(__m512 g, __m512 u, int64_t gelu) {
    __m512 y = g;
    if (gelu) {
        __m512 cubic = _mm512_fmadd_ps(_mm512_mul_ps(g, g), _mm512_set1_ps(0.044715f), _mm512_set1_ps(1.0f));
        y = _mm512_mul_ps(_mm512_mul_ps(g, cubic), _mm512_set1_ps(1.5957691216f));
    }
    __m512 below = _mm512_add_ps(_mm512_set1_ps(1.0f), exp16(_mm512_sub_ps(_mm512_setzero_ps(), y)));
    return _mm512_mul_ps(_mm512_div_ps(g, below), u);
}

static void gated(Work *work, Thread *thread, const Linear *linear, const Input *input, int64_t *counter) {
    int64_t rows = work->step->rows, tiles = (rows + TILE - 1) / TILE, width = work->model->intermediate;
    for (int64_t unit; (unit = next(counter, width / BLOCK_ROWS * tiles)) >= 0;) {
        int64_t block = unit / tiles, row = unit % tiles * TILE, count = rows - row < TILE ? rows - row : TILE;
        Input view = from_row(input, row);
        linear_block(linear, block, &view, count, thread->block);
        linear_block(linear, block + width / BLOCK_ROWS, &view, count, thread->other);
        for (int64_t i = 0; i < count * BLOCK_ROWS; i += LANES) {
            float *at = work->gated + (row + i / BLOCK_ROWS) * width + block * BLOCK_ROWS + i % BLOCK_ROWS;
            __m512 g = _mm512_loadu_ps(thread->block + i), u = _mm512_loadu_ps(thread->other + i);
            _mm512_storeu_ps(at, gate(g, u, work->model->gelu));
        }
    }
}

static void attention(Work *work, const Layer *layer, int64_t *turn, int64_t *see) {
    const Model *model = work->model;
    int64_t units = work->step->rows * model->kv_heads, apart = work->step->apart;
    if (!apart) {
        for (int64_t i; (i = next(turn, units)) >= 0;)
            turn_heads(model, layer, work->step, work->qkv, i / model->kv_heads, i % model->kv_heads);
#pragma omp barrier
    }
    for (int64_t i; (i = next(see, units)) >= 0;) {
        if (apart) turn_heads(model, layer, work->step, work->qkv, i / model->kv_heads, i % model->kv_heads);
        attend(model, layer, work->step, work->qkv, work->seen, i / model->kv_heads, i % model->kv_heads);
    }
}

/* The product's result into the stream, through a norm of its own where the architecture has one. */
static void into_stream(Work *work, Thread *thread, const Linear *linear, const Input *input, int64_t *counter,
                        const float *post_norm) {
    const Step *step = work->step;
    int64_t hidden = work->model->hidden;
    if (!post_norm) {
        product(work, thread, linear, input, counter, 0, 1, step->stream, step->stream_stride);
#pragma omp barrier
        spent(work, PRODUCTS);
        return;
    }
    product(work, thread, linear, input, counter, 0, 0, work->shared_x, hidden);
#pragma omp barrier
    spent(work, PRODUCTS);
    for (int64_t row = omp_get_thread_num(); row < step->rows; row += omp_get_num_threads()) {
        float *x = work->shared_x + row * hidden, *stream = step->stream + row * step->stream_stride;
        norm(x, post_norm, hidden, work->model->eps, x);
        for (int64_t k = 0; k < hidden; k += LANES)
            _mm512_storeu_ps(stream + k, _mm512_add_ps(_mm512_loadu_ps(stream + k), _mm512_loadu_ps(x + k)));
    }
#pragma omp barrier
}

static void layer_step(Work *work, Thread *thread, const Layer *layer, int64_t *counters) {
    int64_t by = phase_counters(work);
    const Input *input = prepare(work, thread, &layer->qkv, 0, layer->attn_norm);
    spent(work, REST);
    product(work, thread, &layer->qkv, input, counters, layer->qkv_bias, 0, work->qkv, layer->qkv.rows);
#pragma omp barrier
    spent(work, PRODUCTS);
    attention(work, layer, counters + by, counters + 2 * by);
#pragma omp barrier
    spent(work, ATTENTION);
    input = prepare(work, thread, &layer->o, work->seen, 0);
    spent(work, REST);
    into_stream(work, thread, &layer->o, input, counters + 3 * by, layer->post_attn_norm);
    input = prepare(work, thread, &layer->gate_up, 0, layer->mlp_norm);
    spent(work, REST);
    gated(work, thread, &layer->gate_up, input, counters + 4 * by); /* with the activation, which is a small part of it */
#pragma omp barrier
    spent(work, PRODUCTS);
    input = prepare(work, thread, &layer->down, work->gated, 0);
    spent(work, REST);
    into_stream(work, thread, &layer->down, input, counters + 5 * by, layer->post_mlp_norm);
}

void laya_step(const Model *model, const Step *step) {
    Work work = {.model = model, .step = step};
    uint8_t *own = lay_out(model, step->rows, step->scratch, &work);
    memset(work.counters, 0, (size_t)counter_bytes(&work, model->layers));
#pragma omp parallel num_threads((int)step->threads)
    {
        Thread thread;
        int64_t bytes = lay_out_thread(model, 0, &thread) - (uint8_t *)0;
        lay_out_thread(model, own + omp_get_thread_num() * bytes, &thread);
        spent(&work, REST);
        int64_t by = PHASES * phase_counters(&work);
        for (int64_t i = 0; i < model->layers; i++) layer_step(&work, &thread, model->layer + i, work.counters + i * by);
    }
}

void laya_logits(const Model *model, const Step *step, float *logits) {
    Work work = {.model = model, .step = step};
    uint8_t *own = lay_out(model, step->rows, step->scratch, &work);
    memset(work.counters, 0, (size_t)phase_counters(&work) * sizeof(int64_t));
#pragma omp parallel num_threads((int)step->threads)
    {
        Thread thread;
        int64_t bytes = lay_out_thread(model, 0, &thread) - (uint8_t *)0;
        lay_out_thread(model, own + omp_get_thread_num() * bytes, &thread);
        const Input *input = prepare(&work, &thread, &model->head, 0, model->final_norm);
        spent(&work, REST);
        product(&work, &thread, &model->head, input, work.counters, 0, 0, logits, model->head.rows);
#pragma omp barrier
        spent(&work, PRODUCTS);
    }
}
