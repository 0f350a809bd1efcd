/* The fast learner's arithmetic in C: MLPs forward and backward, the losses of PPO, and Adam.

   `compiled_kernel.py` compiles it with the machine's own compiler and says what each function is given; it does the
   same as numpy in `numpy_mlp.py` and `gradient_steps.py`. What makes it faster: a gradient step is two calls, blocks of
   rows stay in the first cache from layer to layer, and the products have the sizes of these networks.

   Nothing here assumes that numbers are finite: whoever reads the results must find a NaN in them.
   Arrays of ours have rows padded to whole vectors. The padding may hold anything; it is computed with and ignored. */

#include <math.h>
#include <stdint.h>
#include <string.h>

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
#define INLINE static inline __attribute__((always_inline))

enum activation { TANH, RELU, ELU };

struct layer {
    int64_t inputs, outputs;
    const float *weight, *bias;
    float *weight_gradient, *bias_gradient;
    int64_t input_stride, output_stride; /* of the weights, and of their gradients */
    float *by_input;                     /* memory for the weights as [inputs, padded outputs] */
    float *by_output;                    /* memory for the weights as [outputs, padded inputs] */
    float *sums;                         /* memory for a gradient, in either layout */
    float *activated, *gradient;         /* [rows, padded outputs] */
};

struct network {
    int64_t num_layers, activation;
    struct layer *layers;
};

INLINE int64_t padded(int64_t size) { return (size + LANES - 1) / LANES * LANES; }

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

static void forward(const struct network *net, const float *x, int64_t x_row, int64_t rows) {
    for (int64_t l = 0; l < net->num_layers; l++) {
        const struct layer *one = net->layers + l;
        const int64_t columns = padded(one->outputs);
        float *bias = one->by_input + one->inputs * columns; /* after the weights, and padded too */
        for (int64_t i = 0; i < one->inputs; i++)
            for (int64_t j = 0; j < one->outputs; j++)
                one->by_input[i * columns + j] = one->weight[i * one->input_stride + j * one->output_stride];
        memcpy(bias, one->bias, 4 * one->outputs);
    }
    for (int64_t begin = 0; begin < rows; begin += BLOCK_ROWS) {
        const int64_t count = rows - begin < BLOCK_ROWS ? rows - begin : BLOCK_ROWS;
        const float *input = x + begin * x_row;
        int64_t input_row = x_row;
        for (int64_t l = 0; l < net->num_layers; l++) {
            const struct layer *one = net->layers + l;
            const int64_t columns = padded(one->outputs);
            float *output = one->activated + begin * columns;
            multiply(count, columns, one->inputs, input, input_row, 1, one->by_input, columns, output, columns,
                     one->by_input + one->inputs * columns, 0);
            if (l < net->num_layers - 1) activate(net->activation, output, count * columns);
            input = output;
            input_row = columns;
        }
    }
}

/* The last layer's `gradient` is given; x is what `forward` was given, with rows padded to whole vectors. */
static void backward(const struct network *net, const float *x, int64_t x_row, int64_t rows) {
    for (int64_t l = 0; l < net->num_layers; l++) {
        const struct layer *one = net->layers + l;
        const int64_t columns = padded(one->inputs);
        memset(one->bias_gradient, 0, 4 * one->outputs);
        memset(one->sums, 0, 4 * columns * padded(one->outputs));
        for (int64_t i = 0; l && i < one->outputs; i++)
            for (int64_t j = 0; j < one->inputs; j++)
                one->by_output[i * columns + j] = one->weight[j * one->input_stride + i * one->output_stride];
    }
    for (int64_t begin = 0; begin < rows; begin += BLOCK_ROWS) {
        const int64_t count = rows - begin < BLOCK_ROWS ? rows - begin : BLOCK_ROWS;
        for (int64_t l = net->num_layers - 1; l >= 0; l--) {
            const struct layer *one = net->layers + l, *before = one - 1;
            const int64_t outputs = padded(one->outputs), inputs = padded(one->inputs);
            const float *gradient = one->gradient + begin * outputs;
            const int64_t input_row = l ? inputs : x_row;
            const float *input = l ? before->activated + begin * inputs : x + begin * x_row;
            /* dL/dW = x^T (dL/dy), as [inputs, outputs] or as [outputs, inputs], whichever has less padding */
            if (one->inputs * outputs <= one->outputs * inputs)
                multiply(one->inputs, outputs, count, input, 1, input_row, gradient, outputs, one->sums, outputs, 0, 1);
            else
                multiply(one->outputs, inputs, count, gradient, 1, outputs, input, input_row, one->sums, inputs, 0, 1);
            for (int64_t i = 0; i < count; i++)
                for (int64_t j = 0; j < one->outputs; j++) one->bias_gradient[j] += gradient[i * outputs + j];
            if (!l) break;
            /* dL/dx = (dL/dy) W^T */
            float *passed = before->gradient + begin * inputs;
            multiply(count, inputs, one->outputs, gradient, outputs, 1, one->by_output, inputs, passed, inputs, 0, 0);
            pass_activation(net->activation, passed, input, count * inputs);
        }
    }
    for (int64_t l = 0; l < net->num_layers; l++) {
        const struct layer *one = net->layers + l;
        const int64_t outputs = padded(one->outputs), inputs = padded(one->inputs);
        const int by_input = one->inputs * outputs <= one->outputs * inputs;
        const int64_t row = by_input ? 1 : inputs, column = by_input ? outputs : 1;
        for (int64_t i = 0; i < one->outputs; i++)
            for (int64_t j = 0; j < one->inputs; j++)
                one->weight_gradient[i * one->output_stride + j * one->input_stride] = one->sums[i * row + j * column];
    }
}

/* ------------------------------------------------------------------------------------------------ PPO */

struct ppo {
    struct network actor, critic;
    int64_t obs_size, critic_first; /* numbers of an observation, and the first one that the critic sees */
    int64_t num_categories, has_mask;
    const int64_t *categories;              /* how many choices each category has; NULL for a Gaussian */
    const float *log_std;
    float *log_std_gradient;
    float *obs_rows;                        /* memory for the minibatch's observations, each padded */
    float *d_log_prob, *advantage_rows;     /* memory, [rows] */
    /* the update's rows */
    const float *obs;
    const void *action;                     /* int64 [N, categories], or float [N, outputs] */
    const float *proximal, *weight, *advantage, *target, *old_value;
    /* the settings */
    double clip_range, value_coef, value_clip, masked_logit;
    int64_t normalizes;
    /* the results */
    double policy_loss, value_loss;
};

/* log softmax of each category, and its sum over the chosen ones; 0 if an action is none of the choices. */
static int categorical_log_prob(const struct ppo *p, const int64_t *rows, int64_t count, float *log_prob) {
    const struct layer *last = p->actor.layers + p->actor.num_layers - 1;
    const int64_t columns = padded(last->outputs), row_size = padded(p->obs_size);
    const int64_t *action = p->action;
    for (int64_t r = 0; r < count; r++) {
        float *x = last->activated + r * columns, *probs = last->gradient + r * columns;
        if (p->has_mask) { /* the last numbers of an observation say which choices are allowed */
            const float *mask = p->obs_rows + r * row_size + p->obs_size - last->outputs;
            for (int64_t j = 0; j < last->outputs; j++) x[j] = mask[j] == 0 ? (float)p->masked_logit : x[j];
        }
        for (int64_t c = 0; c < p->num_categories; c++) {
            const int64_t size = p->categories[c], chosen = action[rows[r] * p->num_categories + c];
            if (chosen < 0 || chosen >= size) return 0;
            float highest = x[0], sum = 0;
#pragma omp simd reduction(max : highest)
            for (int64_t j = 0; j < size; j++) highest = x[j] > highest ? x[j] : highest;
#pragma omp simd reduction(+ : sum)
            for (int64_t j = 0; j < size; j++) {
                x[j] -= highest; /* without it exp could overflow */
                probs[j] = exponential(x[j]);
                sum += probs[j];
            }
            const float inverse = 1 / sum, log_sum = logf(sum);
            for (int64_t j = 0; j < size; j++) {
                probs[j] *= inverse;
                x[j] -= log_sum;
            }
            log_prob[r] += x[chosen];
            x += size;
            probs += size;
        }
    }
    return 1;
}

/* Turn `activated` (log-probabilities) and `gradient` (probabilities) of the last layer into its gradient. */
static void categorical_backward(const struct ppo *p, const int64_t *rows, int64_t count, float entropy_weight) {
    const struct layer *last = p->actor.layers + p->actor.num_layers - 1;
    const int64_t columns = padded(last->outputs);
    const int64_t *action = p->action;
    for (int64_t r = 0; r < count; r++) {
        const float *log_probs = last->activated + r * columns, d = p->d_log_prob[r];
        float *probs = last->gradient + r * columns;
        for (int64_t c = 0; c < p->num_categories; c++) {
            const int64_t size = p->categories[c];
            /* d log p_a / d x_j = [j = a] - p_j,  and with H = -sum_i p_i log p_i:  dH / d x_j = -p_j (log p_j + H) */
            float entropy = 0;
            if (entropy_weight != 0) {
#pragma omp simd reduction(- : entropy)
                for (int64_t j = 0; j < size; j++) entropy -= probs[j] * log_probs[j];
                for (int64_t j = 0; j < size; j++) probs[j] *= entropy_weight * (log_probs[j] + entropy) - d;
            } else
                for (int64_t j = 0; j < size; j++) probs[j] *= -d;
            probs[action[rows[r] * p->num_categories + c]] += d;
            log_probs += size;
            probs += size;
        }
    }
}

/* log N(a; mean, std) = -0.5 sum(noise^2) - sum(log std + log sqrt(2 pi)), with noise = (a - mean) / std, which is kept
   in the last layer's `gradient`. */
static void gaussian_log_prob(const struct ppo *p, const int64_t *rows, int64_t count, float *log_prob) {
    const struct layer *last = p->actor.layers + p->actor.num_layers - 1;
    const int64_t size = last->outputs, columns = padded(size);
    const float *action = p->action;
    float constant = 0;
    for (int64_t j = 0; j < size; j++) constant += p->log_std[j] + 0.918938533f;
    for (int64_t j = 0; j < size; j++) {
        const float inverse_std = expf(-p->log_std[j]);
        for (int64_t r = 0; r < count; r++) {
            const float noise = (action[rows[r] * size + j] - last->activated[r * columns + j]) * inverse_std;
            last->gradient[r * columns + j] = noise;
            log_prob[r] -= 0.5f * noise * noise;
        }
    }
    for (int64_t r = 0; r < count; r++) log_prob[r] -= constant;
}

static void gaussian_backward(const struct ppo *p, int64_t count, float entropy_weight) {
    const struct layer *last = p->actor.layers + p->actor.num_layers - 1;
    const int64_t size = last->outputs, columns = padded(size);
    for (int64_t j = 0; j < size; j++) {
        const float inverse_std = expf(-p->log_std[j]);
        /* d log N / d log std = noise^2 - 1,  dH / d log std = 1,  d log N / d mean = noise / std */
        float sum = 0;
        for (int64_t r = 0; r < count; r++) {
            const float noise = last->gradient[r * columns + j];
            sum += p->d_log_prob[r] * (noise * noise - 1);
            last->gradient[r * columns + j] = p->d_log_prob[r] * noise * inverse_std;
        }
        p->log_std_gradient[j] = sum - entropy_weight * count;
    }
}

/* Take the advantages of a minibatch; (A - mean) / (std + 1e-8) where they are normalised. `of_all` are those of other
   learners' rows too, or NULL. */
static void take_advantages(const struct ppo *p, const int64_t *rows, int64_t count, const float *of_all,
                            int64_t num_all) {
    float *advantage = p->advantage_rows;
    for (int64_t r = 0; r < count; r++) advantage[r] = p->advantage[rows[r]];
    if (!of_all) {
        of_all = advantage;
        num_all = count;
    }
    if (!p->normalizes || num_all <= 1) return;
    double sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t r = 0; r < num_all; r++) sum += of_all[r];
    const double mean = sum / num_all;
#pragma omp simd reduction(+ : squares)
    for (int64_t r = 0; r < num_all; r++) squares += (of_all[r] - mean) * (of_all[r] - mean);
    const float inverse = (float)(1 / (sqrt(squares / (num_all - 1)) + 1e-8));
    for (int64_t r = 0; r < count; r++) advantage[r] = (advantage[r] - (float)mean) * inverse;
}

/* Compute the losses of a minibatch and what `ppo_backward` needs. log(pi / pi_proximal) of its rows goes to
   `log_ratio`. Returns 0 if an action is none of the choices. */
int64_t ppo_forward(struct ppo *p, const int64_t *rows, int64_t count, float *log_ratio, const float *of_all,
                    int64_t num_all) {
    const int64_t row_size = padded(p->obs_size);
    for (int64_t r = 0; r < count; r++)
        memcpy(p->obs_rows + r * row_size, p->obs + rows[r] * p->obs_size, 4 * p->obs_size);
    forward(&p->actor, p->obs_rows, row_size, count);
    forward(&p->critic, p->obs_rows + p->critic_first, row_size, count);
    take_advantages(p, rows, count, of_all, num_all);
    for (int64_t r = 0; r < count; r++) log_ratio[r] = -p->proximal[rows[r]];
    if (!p->categories) gaussian_log_prob(p, rows, count, log_ratio);
    else if (!categorical_log_prob(p, rows, count, log_ratio)) return 0;

    const struct layer *last = p->critic.layers + p->critic.num_layers - 1;
    const float low = (float)(1 - p->clip_range), high = (float)(1 + p->clip_range);
    const float share = count ? 1.0f / count : 1.0f; /* other learners may have all rows */
    const float value_weight = (float)(2 * p->value_coef * share), value_clip = (float)p->value_clip;
    double policy_loss = 0, value_loss = 0;
    for (int64_t r = 0; r < count; r++) {
        /* L = -mean(w * min(ratio * A, clip(ratio) * A)), so dL/dlog_ratio = -w * ratio * A / n where the first is the
           smaller one, and 0 where the clipped one is. A NaN stays one in spite of the factor 0. */
        const float advantage = p->advantage_rows[r], weight = -p->weight[rows[r]] * share;
        const float ratio = expf(log_ratio[r]), objective = ratio * advantage;
        const float clipped = (ratio < low ? low : ratio > high ? high : ratio) * advantage;
        const int is_unclipped = objective <= clipped;
        policy_loss += weight * (is_unclipped ? objective : clipped);
        p->d_log_prob[r] = objective * weight * (float)is_unclipped;

        /* L = mean((V - target)^2), so dL/dV = 2 (V - target) / n */
        const float value = last->activated[r * LANES], target = p->target[rows[r]];
        float error = value - target, slope = error * value_weight;
        if (value_clip > 0) {
            /* The larger one counts of (V - target)^2 and (V_old + clip(V - V_old) - target)^2. Beyond the limits the
               slope of the second is 0; within them both are the same. */
            const float old = p->old_value[rows[r]], moved = value - old;
            const float held = moved < 0 ? -value_clip : value_clip, clipped_error = old + held - target;
            const int is_held = fabsf(moved) > value_clip && fabsf(clipped_error) > fabsf(error);
            slope *= (float)!is_held;
            error = is_held ? clipped_error : error;
        }
        last->gradient[r * LANES] = slope;
        value_loss += error * error;
    }
    p->policy_loss = policy_loss;
    p->value_loss = value_loss * share;
    return 1;
}

/* Write the gradients of the minibatch that `ppo_forward` was given last. */
void ppo_backward(const struct ppo *p, const int64_t *rows, int64_t count, double entropy_weight) {
    const int64_t row_size = padded(p->obs_size);
    if (p->categories) categorical_backward(p, rows, count, (float)entropy_weight);
    else gaussian_backward(p, count, (float)entropy_weight);
    backward(&p->actor, p->obs_rows, row_size, count);
    backward(&p->critic, p->obs_rows + p->critic_first, row_size, count);
}

/* ------------------------------------------------------------------------------------------------ Adam */

/* Clip a gradient by its norm and take a step of Adam. Returns 0, and changes nothing, if it is not finite. */
int64_t adam_step(int64_t size, float *weights, float *gradient, float *mean, float *square, float *num_steps,
                  double max_norm, double learning_rate, double beta1, double beta2, double epsilon) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; i++) sum += gradient[i] * gradient[i];
    if (!isfinite(sum)) return 0;
    /* g <- g * min(1, max_norm / (|g| + 1e-6)) */
    const double norm = sqrt(sum) + 1e-6;
    const float scale = norm > max_norm ? (float)(max_norm / norm) : 1.0f;
    const double t = *num_steps += 1;
    const float rate = (float)(learning_rate / (1 - pow(beta1, t))), rest1 = (float)(1 - beta1);
    const float decay = (float)beta2, rest2 = (float)(1 - beta2), tiny = (float)epsilon;
    const float correction = (float)(1 / sqrt(1 - pow(beta2, t)));
    /* m <- m + (1 - b1) (g - m),  v <- b2 v + (1 - b2) g^2,  w <- w - lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps) */
#pragma omp simd
    for (int64_t i = 0; i < size; i++) {
        const float g = gradient[i] * scale;
        mean[i] += rest1 * (g - mean[i]);
        square[i] = decay * square[i] + rest2 * g * g;
        weights[i] -= rate * mean[i] / (sqrtf(square[i]) * correction + tiny);
    }
    return 1;
}

int64_t floats_in_a_vector(void) { return LANES; }
