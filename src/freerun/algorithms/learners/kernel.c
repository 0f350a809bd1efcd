/* The fast learner's arithmetic in C: the losses of PPO with their gradients, and Adam.

   `compiled_kernel.py` compiles it with the machine's own compiler. It computes what `gradient_steps.py` and
   `numpy_mlp.py` compute in numpy, but a gradient step is three calls instead of a hundred. A NaN must stay one here too:
   `adam_step` finds it in the gradient. */

#include "mlp.h"

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

/* ------------------------------------------------------------------------------------------------ without gradients */

/* The outputs of a network for `rows` observations; the last layer's `activated` holds them. */
void network_forward(const struct network *net, const float *x, int64_t x_row, int64_t rows) {
    forward(net, x, x_row, rows);
}

int64_t floats_in_a_vector(void) { return LANES; }
