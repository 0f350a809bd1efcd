/* MLPs in C, forward and backward: the networks of `kernel.c`.

   They compute what `numpy_mlp.py` computes in numpy. What makes it faster: blocks of rows stay in the cache
   from layer to layer, and products of this size need no preparation.

   Nothing here assumes that numbers are finite: whoever reads the results must find a NaN in them.
   Arrays of ours have rows padded to whole vectors. The padding may hold anything; it is computed with and ignored. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "threads.h"

#if defined(__AVX512F__)
#define LANES 16 /* floats in a vector register */
#define WIDTH 4  /* vectors side by side in a tile: 6 x 4 sums and their operands fill 32 registers */
#elif defined(__AVX__)
#define LANES 8
#define WIDTH 2 /* 16 registers */
#else
#define LANES 4
#define WIDTH 4
#endif
#define HEIGHT 6      /* rows of a tile */
#define BLOCK_ROWS 96 /* rows that go through all layers together: 64 numbers each take 24 KiB */

typedef float vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

enum activation { TANH, RELU, ELU };

struct layer {
    int64_t inputs, outputs;
    const float *weight, *bias;
    float *weight_gradient, *bias_gradient;
    int64_t input_stride, output_stride; /* of the weights, and of their gradients */
    /* memory of each thread: the weights as [inputs, padded outputs] with the biases behind them, and the weights as
       [outputs, padded inputs] */
    float *by_input, *by_output;
    float *sums;                 /* memory of each part: its gradient, in either layout, with that of the biases behind */
    float *activated, *gradient; /* [rows, padded outputs] */
};

struct network {
    int64_t num_layers, activation;
    struct layer *layers;
    float *scratch;  /* memory of each thread: what two layers compute for BLOCK_ROWS rows */
    int64_t widest;  /* numbers in a padded row of the widest layer */
    int64_t version; /* of the weights: whoever begins to compute counts it up, because they may have changed */
    int64_t *by_input_version, *by_output_version; /* of what each thread has copied */
};

INLINE int64_t padded(int64_t size) { return (size + LANES - 1) / LANES * LANES; }

/* Copy a matrix whose two sides have any strides. */
static void copy(int64_t rows, int64_t columns, float *to, int64_t to_row, int64_t to_column, const float *from,
                 int64_t from_row, int64_t from_column) {
    for (int64_t i = 0; i < rows; i++)
        if (to_column == 1 && from_column == 1) memcpy(to + i * to_row, from + i * from_row, 4 * columns);
        else
            for (int64_t j = 0; j < columns; j++) to[i * to_row + j * to_column] = from[i * from_row + j * from_column];
}

/* ------------------------------------------------------------------------------------------------ products */

/* C = start + A B for a tile of `height` rows and `width` vectors, both known to the compiler. `start` is a row that all
   rows begin with, C itself where it is NULL and `adds`, else zero. */
INLINE void tile(const int height, const int width, int64_t depth, const float *a, int64_t a_row, int64_t a_step,
                 const float *b, int64_t b_step, float *c, int64_t c_row, const float *start, int adds) {
    vector sums[HEIGHT * 2][WIDTH]; /* registers, where the compiler knows all indices */
    for (int i = 0; i < height; i++)
        for (int j = 0; j < width; j++)
            if (start) sums[i][j] = *(const vector *)(start + j * LANES);
            else if (adds) sums[i][j] = *(const vector *)(c + i * c_row + j * LANES);
            else sums[i][j] = (vector){0};
    for (int64_t k = 0; k < depth; k++) {
        vector right[WIDTH];
        for (int j = 0; j < width; j++) right[j] = *(const vector *)(b + k * b_step + j * LANES);
        for (int i = 0; i < height; i++) {
            const float left = a[i * a_row + k * a_step];
            for (int j = 0; j < width; j++) sums[i][j] += left * right[j];
        }
    }
    for (int i = 0; i < height; i++)
        for (int j = 0; j < width; j++) *(vector *)(c + i * c_row + j * LANES) = sums[i][j];
}

/* A column of tiles: `tall` rows at a time, then half as many, then single rows. */
INLINE void tiles(const int tall, const int width, int64_t rows, int64_t depth, const float *a, int64_t a_row,
                  int64_t a_step, const float *b, int64_t b_step, float *c, int64_t c_row, const float *start,
                  int adds) {
    int64_t i = 0;
    for (; i + tall <= rows; i += tall)
        tile(tall, width, depth, a + i * a_row, a_row, a_step, b, b_step, c + i * c_row, c_row, start, adds);
    for (; i + tall / 2 <= rows; i += tall / 2)
        tile(tall / 2, width, depth, a + i * a_row, a_row, a_step, b, b_step, c + i * c_row, c_row, start, adds);
    for (; i < rows; i++)
        tile(1, width, depth, a + i * a_row, a_row, a_step, b, b_step, c + i * c_row, c_row, start, adds);
}

/* C [rows, columns] = start + A [rows, depth] B [depth, columns]; `columns` are whole vectors. A may have any strides. */
static void multiply(int64_t rows, int64_t columns, int64_t depth, const float *a, int64_t a_row, int64_t a_step,
                     const float *b, int64_t b_step, float *c, int64_t c_row, const float *start, int adds) {
    for (int64_t j = 0; j < columns;) {
        const int64_t left = (columns - j) / LANES;
        const float *first = start ? start + j : 0;
#define TILES(tall, width) tiles(tall, width, rows, depth, a, a_row, a_step, b + j, b_step, c + j, c_row, first, adds)
        /* A narrow tile is taller: the processor works on eight sums at least at the same time. */
        if (left >= WIDTH) { TILES(HEIGHT, WIDTH); j += WIDTH * LANES; }
        else if (left >= 2) { TILES(HEIGHT * 2, 2); j += 2 * LANES; }
        else { TILES(HEIGHT * 2, 1); j += LANES; }
#undef TILES
    }
}

/* ------------------------------------------------------------------------------------------------ functions */

/* exp(x) = 2^n exp(r) with |r| <= ln(2) / 2 and Taylor's polynomial for exp(r), which is exact to 2e-8 there. */
INLINE float exponential(float x) {
    x = x > 88.7f ? 88.7f : x; /* 3e38; nearly the largest number */
    x = x < -104.0f ? -104.0f : x; /* where it is 0 */
    const float turns = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the sum is rounded to a whole number */
    const float n = turns - 12582912.0f;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f; /* ln(2) in two parts, the first one short */
    float y = 1.0f / 5040;
    y = y * r + 1.0f / 720;
    y = y * r + 1.0f / 120;
    y = y * r + 1.0f / 24;
    y = y * r + 1.0f / 6;
    y = y * r + 0.5f;
    y = y * r + 1.0f;
    y = y * r + 1.0f;
    /* 2^n in two factors: a float has no exponent for the smallest and the largest n. */
    const int32_t whole = (int32_t)n, half = whole / 2;
    const int32_t bits[2] = {(half + 127) << 23, (whole - half + 127) << 23};
    float low, high;
    memcpy(&low, bits, 4);
    memcpy(&high, bits + 1, 4);
    return y * low * high;
}

/* tanh(x) = x P(x^2) / Q(x^2), fitted for |x| <= 8, with a relative error below 4e-7. */
INLINE float tangent(float x) {
    x = x > 8.0f ? 8.0f : x;
    x = x < -8.0f ? -8.0f : x;
    const float u = x * x;
    const float p = (((1.52304658e-08f * u + 2.18946989e-05f) * u + 3.57160040e-03f) * u + 1.34445000e-01f) * u + 1.0f;
    const float q = (((8.52246690e-07f * u + 3.41129581e-04f) * u + 2.61644522e-02f) * u + 4.67778274e-01f) * u + 1.0f;
    return x * p / q;
}

static void activate(int64_t activation, float *x, int64_t size) {
    if (activation == TANH)
        for (int64_t i = 0; i < size; i++) x[i] = tangent(x[i]);
    else if (activation == RELU)
        for (int64_t i = 0; i < size; i++) x[i] = x[i] < 0 ? 0 : x[i];
    else
        for (int64_t i = 0; i < size; i++) x[i] = x[i] > 0 ? x[i] : exponential(x[i]) - 1;
}

/* Multiply a gradient by f'(u), given f(u). */
static void pass_activation(int64_t activation, float *gradient, const float *y, int64_t size) {
    if (activation == TANH) /* tanh'(u) = 1 - tanh(u)^2 */
        for (int64_t i = 0; i < size; i++) gradient[i] *= 1 - y[i] * y[i];
    else if (activation == RELU)
        for (int64_t i = 0; i < size; i++) gradient[i] *= y[i] > 0 ? 1 : 0;
    else /* elu'(u) = 1 where elu(u) > 0, and exp(u) = elu(u) + 1 elsewhere */
        for (int64_t i = 0; i < size; i++) gradient[i] *= y[i] > 0 ? 1 : y[i] + 1;
}

/* ------------------------------------------------------------------------------------------------ networks */

INLINE int64_t by_input_size(const struct layer *one) { return (one->inputs + 1) * padded(one->outputs); }
INLINE int64_t by_output_size(const struct layer *one) { return one->outputs * padded(one->inputs); }
INLINE int64_t sums_size(const struct layer *one) { return (padded(one->inputs) + 1) * padded(one->outputs); }

/* Copy the weights as a thread multiplies by them, unless it has done so already. */
static void copy_by_input(struct network *net, int64_t thread) {
    if (net->by_input_version[thread] == net->version) return;
    net->by_input_version[thread] = net->version;
    for (int64_t l = 0; l < net->num_layers; l++) {
        const struct layer *one = net->layers + l;
        const int64_t columns = padded(one->outputs);
        float *weight = one->by_input + thread * by_input_size(one);
        copy(one->inputs, one->outputs, weight, columns, 1, one->weight, one->input_stride, one->output_stride);
        memcpy(weight + one->inputs * columns, one->bias, 4 * one->outputs);
    }
}

static void copy_by_output(struct network *net, int64_t thread) {
    if (net->by_output_version[thread] == net->version) return;
    net->by_output_version[thread] = net->version;
    for (int64_t l = 1; l < net->num_layers; l++) { /* no gradient goes back through the first one */
        const struct layer *one = net->layers + l;
        copy(one->outputs, one->inputs, one->by_output + thread * by_output_size(one), padded(one->inputs), 1,
             one->weight, one->output_stride, one->input_stride);
    }
}

/* Compute rows `begin` to `end`, given `begin`'s. With `scratch` only the outputs are kept, in the returned memory; else
   each layer keeps its own. There are BLOCK_ROWS rows at most then. */
static const float *forward_block(struct network *net, int64_t thread, const float *input, int64_t input_row,
                                  int64_t begin, int64_t end, float *scratch) {
    for (int64_t l = 0; l < net->num_layers; l++) {
        const struct layer *one = net->layers + l;
        const int64_t columns = padded(one->outputs);
        const float *weight = one->by_input + thread * by_input_size(one);
        float *output = scratch ? scratch + l % 2 * BLOCK_ROWS * net->widest : one->activated + begin * columns;
        multiply(end - begin, columns, one->inputs, input, input_row, 1, weight, columns, output, columns,
                 weight + one->inputs * columns, 0);
        if (l < net->num_layers - 1) activate(net->activation, output, (end - begin) * columns);
        input = output;
        input_row = columns;
    }
    return input;
}

/* Compute rows `begin` to `end` of x, and keep what `backward` needs. */
static void forward(struct network *net, int64_t thread, const float *x, int64_t x_row, int64_t begin, int64_t end) {
    copy_by_input(net, thread);
    for (int64_t next = begin + BLOCK_ROWS; begin < end; begin = next, next += BLOCK_ROWS)
        forward_block(net, thread, x + begin * x_row, x_row, begin, next < end ? next : end, 0);
}

/* True if the sums of a weight's gradient are kept as [inputs, outputs]; [outputs, inputs] may have less padding. */
INLINE int is_by_input(const struct layer *one) {
    return one->inputs * padded(one->outputs) < one->outputs * padded(one->inputs);
}

/* Sum up the gradients of rows `begin` to `end`, which are a part of all. The last layer's `gradient` is given; x is what
   `forward` was given, with rows padded to whole vectors. */
static void backward(struct network *net, int64_t thread, int64_t part, const float *x, int64_t x_row, int64_t begin,
                     int64_t end) {
    copy_by_output(net, thread);
    for (int64_t l = 0; l < net->num_layers; l++) {
        const struct layer *one = net->layers + l;
        const int64_t size = sums_size(one), biases = padded(one->outputs);
        float *sums = one->sums + part * size;
        /* The first block of rows overwrites those of the weights. */
        if (begin == end) memset(sums, 0, 4 * size);
        else memset(sums + size - biases, 0, 4 * biases);
    }
    for (int64_t next = begin + BLOCK_ROWS, adds = 0; begin < end; begin = next, next += BLOCK_ROWS, adds = 1) {
        const int64_t count = (next < end ? next : end) - begin;
        for (int64_t l = net->num_layers - 1; l >= 0; l--) {
            const struct layer *one = net->layers + l, *before = one - 1;
            const int64_t outputs = padded(one->outputs), inputs = padded(one->inputs);
            const float *gradient = one->gradient + begin * outputs;
            const int64_t input_row = l ? inputs : x_row;
            const float *input = l ? before->activated + begin * inputs : x + begin * x_row;
            float *sums = one->sums + part * sums_size(one), *bias_sums = sums + inputs * outputs;
            /* dL/dW = x^T (dL/dy) */
            if (is_by_input(one))
                multiply(one->inputs, outputs, count, input, 1, input_row, gradient, outputs, sums, outputs, 0, adds);
            else
                multiply(one->outputs, inputs, count, gradient, 1, outputs, input, input_row, sums, inputs, 0, adds);
            for (int64_t i = 0; i < count; i++)
                for (int64_t j = 0; j < one->outputs; j++) bias_sums[j] += gradient[i * outputs + j];
            if (!l) break;
            /* dL/dx = (dL/dy) W^T */
            float *passed = before->gradient + begin * inputs;
            multiply(count, inputs, one->outputs, gradient, outputs, 1, one->by_output + thread * by_output_size(one),
                     inputs, passed, inputs, 0, 0);
            pass_activation(net->activation, passed, input, count * inputs);
        }
    }
}

/* Add up the gradients of all parts, in their order, and write them where they belong. */
static void add_parts(const struct network *net, int64_t num_parts) {
    for (int64_t l = 0; l < net->num_layers; l++) {
        const struct layer *one = net->layers + l;
        const int64_t outputs = padded(one->outputs), inputs = padded(one->inputs), size = sums_size(one);
        const int64_t row = is_by_input(one) ? 1 : inputs, column = is_by_input(one) ? outputs : 1;
        for (int64_t part = 1; part < num_parts; part++) {
            float *all = one->sums;
            const float *added = all + part * size;
            for (int64_t i = 0; i < size; i++) all[i] += added[i];
        }
        copy(one->outputs, one->inputs, one->weight_gradient, one->output_stride, one->input_stride, one->sums, row,
             column);
        memcpy(one->bias_gradient, one->sums + inputs * outputs, 4 * one->outputs);
    }
}
