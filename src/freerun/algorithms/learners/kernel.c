/* The fast learner's arithmetic in C: the losses of PPO with their gradients, and Adam.

   `compiled_kernel.py` compiles it with the machine's own compiler. It computes what `gradient_steps.py` and
   `numpy_mlp.py` compute in numpy, but all gradient steps of an update are one call. A NaN must stay one here too:
   `adam_step` finds it in the gradient. */

#include "ppo.h"

/* ------------------------------------------------------------------------------------------------ Adam */

struct adam {
    int64_t size;
    float *weights, *gradient, *mean, *square, *num_steps;
    double max_norm, learning_rate, beta1, beta2, epsilon;
};

/* Clip a gradient by its norm and take a step of Adam. Returns 0, and changes nothing, if it is not finite. */
int64_t adam_step(const struct adam *a) {
    float *weights = a->weights, *mean = a->mean, *square = a->square;
    const float *gradient = a->gradient;
    const int64_t size = a->size;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; i++) sum += gradient[i] * gradient[i];
    if (!isfinite(sum)) return 0;
    /* g <- g * min(1, max_norm / (|g| + 1e-6)) */
    const double norm = sqrt(sum) + 1e-6;
    const float scale = norm > a->max_norm ? (float)(a->max_norm / norm) : 1.0f;
    const double t = *a->num_steps += 1;
    const float rate = (float)(a->learning_rate / (1 - pow(a->beta1, t))), rest1 = (float)(1 - a->beta1);
    const float decay = (float)a->beta2, rest2 = (float)(1 - a->beta2), tiny = (float)a->epsilon;
    const float correction = (float)(1 / sqrt(1 - pow(a->beta2, t)));
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

/* ------------------------------------------------------------------------------------------------ whole updates */

/* The results of several gradient steps. */
struct descent {
    double policy_loss, value_loss; /* sums over the steps */
    int64_t num_bad;                /* steps that were not taken, because their gradient is not finite */
};

/* Take a gradient step on each of these minibatches, where nobody has to look at anything in between. Returns 0 if an
   action is none of the choices. */
int64_t ppo_descend(struct ppo *p, int64_t num_minibatches, const int64_t *const *rows, const int64_t *counts,
                    double entropy_coef, const struct adam *adam, float *log_ratio, struct descent *result) {
    for (int64_t i = 0; i < num_minibatches; i++) {
        take_advantages(p, rows[i], counts[i], 0, 0);
        struct minibatch m = {
            .ppo = p, .rows = rows[i], .count = counts[i], .log_ratio = log_ratio, .goes_forward = 1,
            .goes_backward = 1, .entropy_weight = entropy_coef / (counts[i] ? counts[i] : 1)};
        if (!run_minibatch(&m)) return 0;
        result->policy_loss += p->policy_loss;
        result->value_loss += p->value_loss;
        result->num_bad += !adam_step(adam);
        log_ratio += counts[i];
    }
    return 1;
}

/* ------------------------------------------------------------------------------------------------ without gradients */

#define MOST_FORWARD_TASKS 64

struct rows {
    struct network *net;
    const float *x;
    int64_t x_row, count, per_task;
    float *output;
};

static void forward_task(void *context, int64_t task, int64_t thread) {
    const struct rows *rows = context;
    struct network *net = rows->net;
    const int64_t outputs = net->layers[net->num_layers - 1].outputs;
    const int64_t last = (task + 1) * rows->per_task, end = last < rows->count ? last : rows->count;
    float *scratch = net->scratch + thread * 2 * BLOCK_ROWS * net->widest;
    copy_by_input(net, thread);
    for (int64_t begin = task * rows->per_task; begin < end; begin += BLOCK_ROWS) {
        const int64_t count = end - begin < BLOCK_ROWS ? end - begin : BLOCK_ROWS;
        const float *from = forward_block(net, thread, rows->x + begin * rows->x_row, rows->x_row, 0, count, scratch);
        copy(count, outputs, rows->output + begin * outputs, outputs, 1, from, padded(outputs), 1);
    }
}

/* The outputs of a network for any number of rows. There is memory for this number of threads. */
void network_forward(struct network *net, int64_t num_threads, const float *x, int64_t x_row, int64_t count,
                     float *output) {
    const int64_t num_blocks = (count + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const int64_t blocks_per_task = (num_blocks + MOST_FORWARD_TASKS - 1) / MOST_FORWARD_TASKS;
    if (!count) return;
    struct rows rows = {net, x, x_row, count, blocks_per_task * BLOCK_ROWS, output};
    net->version++; /* the weights may have changed */
    run_tasks((num_blocks + blocks_per_task - 1) / blocks_per_task, num_threads, forward_task, &rows);
}

/* ------------------------------------------------------------------------------------------------ sizes */

int64_t floats_in_a_vector(void) { return LANES; }
int64_t rows_in_a_block(void) { return BLOCK_ROWS; }
int64_t num_tasks(int64_t rows) { return 2 * num_parts(rows); }
int64_t most_parts(void) { return MOST_PARTS; }
int64_t most_threads(void) { return MOST_THREADS; }
