/* PPO's losses and their gradients: what `gradient_steps.py` computes in numpy.

   A minibatch is cut into parts by its number of rows alone, and the gradients of the parts are added in their order. So
   results are the same to the last bit for any number of threads. */

#include "mlp.h"

#define PART_ROWS 64 /* about; each part costs the copies and the sum of its gradients */
#define MOST_PARTS 4

/* What a part of the rows adds to the losses. */
struct part {
    double policy_loss, value_loss;
    int64_t is_invalid; /* an action is none of the choices */
};

struct ppo {
    struct network *actor, *critic;
    int64_t num_threads; /* that there is memory for */
    int64_t obs_size, critic_first; /* numbers of an observation, and the first one that the critic sees */
    int64_t num_categories, has_mask;
    const int64_t *categories;              /* how many choices each category has; NULL for a Gaussian */
    const float *log_std;
    float *log_std_gradient;
    float *log_std_sums;                    /* memory of each part: the gradient of log_std */
    float *actor_rows, *critic_rows;        /* memory for what each sees of the minibatch's rows, each padded */
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
    struct part *parts;                     /* [MOST_PARTS] */
};

/* Rows of a minibatch, and what is to be done with them. */
struct minibatch {
    struct ppo *ppo;
    const int64_t *rows;
    int64_t count, num_parts;
    float *log_ratio;
    double entropy_weight;
    int64_t goes_forward, goes_backward;
    atomic_int num_left[2]; /* parts of actor and critic whose gradients are not there yet */
};

static int64_t num_parts(int64_t rows) {
    const int64_t parts = (rows + PART_ROWS / 2) / PART_ROWS;
    return parts < 1 ? 1 : parts > MOST_PARTS ? MOST_PARTS : parts;
}

/* The first row of a part. Products take HEIGHT rows at a time, or twice as many. */
static int64_t first_row(const struct minibatch *m, int64_t part) {
    return part == m->num_parts ? m->count : m->count * part / m->num_parts / (2 * HEIGHT) * (2 * HEIGHT);
}

/* Copy numbers from `first` on of the observations of these rows. */
static void gather(const struct ppo *p, const int64_t *rows, int64_t begin, int64_t end, int64_t first, float *to) {
    const int64_t size = p->obs_size - first, row_size = padded(p->obs_size);
    for (int64_t r = begin; r < end; r++) memcpy(to + r * row_size, p->obs + rows[r] * p->obs_size + first, 4 * size);
}

/* log softmax of each category, and its sum over the chosen ones; 0 if an action is none of the choices. */
static int categorical_log_prob(const struct ppo *p, const int64_t *rows, int64_t begin, int64_t end, float *log_prob) {
    const struct layer *last = p->actor->layers + p->actor->num_layers - 1;
    const int64_t columns = padded(last->outputs), row_size = padded(p->obs_size);
    const int64_t *action = p->action;
    for (int64_t r = begin; r < end; r++) {
        float *x = last->activated + r * columns, *probs = last->gradient + r * columns;
        if (p->has_mask) { /* the last numbers of an observation say which choices are allowed */
            const float *mask = p->actor_rows + r * row_size + p->obs_size - last->outputs;
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
static void categorical_backward(const struct ppo *p, const int64_t *rows, int64_t begin, int64_t end,
                                 float entropy_weight) {
    const struct layer *last = p->actor->layers + p->actor->num_layers - 1;
    const int64_t columns = padded(last->outputs);
    const int64_t *action = p->action;
    for (int64_t r = begin; r < end; r++) {
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
static void gaussian_log_prob(const struct ppo *p, const int64_t *rows, int64_t begin, int64_t end, float *log_prob) {
    const struct layer *last = p->actor->layers + p->actor->num_layers - 1;
    const int64_t size = last->outputs, columns = padded(size);
    const float *action = p->action;
    float constant = 0;
    for (int64_t j = 0; j < size; j++) constant += p->log_std[j] + 0.918938533f;
    for (int64_t j = 0; j < size; j++) {
        const float inverse_std = expf(-p->log_std[j]);
        for (int64_t r = begin; r < end; r++) {
            const float noise = (action[rows[r] * size + j] - last->activated[r * columns + j]) * inverse_std;
            last->gradient[r * columns + j] = noise;
            log_prob[r] -= 0.5f * noise * noise;
        }
    }
    for (int64_t r = begin; r < end; r++) log_prob[r] -= constant;
}

static void gaussian_backward(const struct ppo *p, int64_t part, int64_t begin, int64_t end, float entropy_weight) {
    const struct layer *last = p->actor->layers + p->actor->num_layers - 1;
    const int64_t size = last->outputs, columns = padded(size);
    for (int64_t j = 0; j < size; j++) {
        const float inverse_std = expf(-p->log_std[j]);
        /* d log N / d log std = noise^2 - 1,  dH / d log std = 1,  d log N / d mean = noise / std */
        float sum = 0;
        for (int64_t r = begin; r < end; r++) {
            const float noise = last->gradient[r * columns + j];
            sum += p->d_log_prob[r] * (noise * noise - 1);
            last->gradient[r * columns + j] = p->d_log_prob[r] * noise * inverse_std;
        }
        p->log_std_sums[part * columns + j] = sum - entropy_weight * (end - begin);
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

/* The policy's loss of rows `begin` to `end`, and its gradient by their log-probabilities. */
static double policy_loss(const struct ppo *p, const int64_t *rows, int64_t begin, int64_t end, float share,
                          const float *log_ratio) {
    const float low = (float)(1 - p->clip_range), high = (float)(1 + p->clip_range);
    double loss = 0;
    for (int64_t r = begin; r < end; r++) {
        /* L = -mean(w * min(ratio * A, clip(ratio) * A)), so dL/dlog_ratio = -w * ratio * A / n where the first is the
           smaller one, and 0 where the clipped one is. A NaN stays one in spite of the factor 0. */
        const float advantage = p->advantage_rows[r], weight = -p->weight[rows[r]] * share;
        const float ratio = expf(log_ratio[r]), objective = ratio * advantage;
        const float clipped = (ratio < low ? low : ratio > high ? high : ratio) * advantage;
        const int is_unclipped = objective <= clipped;
        loss += weight * (is_unclipped ? objective : clipped);
        p->d_log_prob[r] = objective * weight * (float)is_unclipped;
    }
    return loss;
}

/* The value function's loss of rows `begin` to `end`, and its gradient by their values. */
static double value_loss(const struct ppo *p, const int64_t *rows, int64_t begin, int64_t end, float share) {
    const struct layer *last = p->critic->layers + p->critic->num_layers - 1;
    const float weight = (float)(2 * p->value_coef * share), value_clip = (float)p->value_clip;
    double loss = 0;
    for (int64_t r = begin; r < end; r++) {
        /* L = mean((V - target)^2), so dL/dV = 2 (V - target) / n */
        const float value = last->activated[r * LANES], target = p->target[rows[r]];
        float error = value - target, slope = error * weight;
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
        loss += error * error;
    }
    return loss * share;
}

/* The actor's losses and gradients for a part of the rows. */
static void actor_part(struct minibatch *m, int64_t part, int64_t thread) {
    struct ppo *p = m->ppo;
    const int64_t row_size = padded(p->obs_size), begin = first_row(m, part), end = first_row(m, part + 1);
    if (m->goes_forward) {
        gather(p, m->rows, begin, end, 0, p->actor_rows);
        forward(p->actor, thread, p->actor_rows, row_size, begin, end);
        for (int64_t r = begin; r < end; r++) m->log_ratio[r] = -p->proximal[m->rows[r]];
        p->parts[part].is_invalid = 0;
        if (!p->categories) gaussian_log_prob(p, m->rows, begin, end, m->log_ratio);
        else p->parts[part].is_invalid = !categorical_log_prob(p, m->rows, begin, end, m->log_ratio);
        if (p->parts[part].is_invalid) return;
        const float share = m->count ? 1.0f / m->count : 1.0f; /* other learners may have all rows */
        p->parts[part].policy_loss = policy_loss(p, m->rows, begin, end, share, m->log_ratio);
    }
    if (m->goes_backward) {
        if (p->categories) categorical_backward(p, m->rows, begin, end, (float)m->entropy_weight);
        else gaussian_backward(p, part, begin, end, (float)m->entropy_weight);
        backward(p->actor, thread, part, p->actor_rows, row_size, begin, end);
    }
}

static void critic_part(struct minibatch *m, int64_t part, int64_t thread) {
    struct ppo *p = m->ppo;
    const int64_t row_size = padded(p->obs_size), begin = first_row(m, part), end = first_row(m, part + 1);
    if (m->goes_forward) {
        gather(p, m->rows, begin, end, p->critic_first, p->critic_rows);
        forward(p->critic, thread, p->critic_rows, row_size, begin, end);
        const float share = m->count ? 1.0f / m->count : 1.0f;
        p->parts[part].value_loss = value_loss(p, m->rows, begin, end, share);
    }
    if (m->goes_backward) backward(p->critic, thread, part, p->critic_rows, row_size, begin, end);
}

/* The gradient of log_std is the sum of those of all parts. */
static void add_log_std(const struct ppo *p, int64_t parts) {
    const int64_t size = p->actor->layers[p->actor->num_layers - 1].outputs;
    for (int64_t j = 0; j < size; j++) {
        float sum = p->log_std_sums[j];
        for (int64_t part = 1; part < parts; part++) sum += p->log_std_sums[part * padded(size) + j];
        p->log_std_gradient[j] = sum;
    }
}

/* Tasks are parts of the actor, which takes longer, and of the critic by turns. Whoever finishes the last part of a
   network adds up its gradients. */
static void ppo_task(void *context, int64_t task, int64_t thread) {
    struct minibatch *m = context;
    const int64_t part = task / 2, is_critic = task % 2;
    if (is_critic) critic_part(m, part, thread);
    else actor_part(m, part, thread);
    if (!m->goes_backward || atomic_fetch_sub(m->num_left + is_critic, 1) > 1) return;
    add_parts(is_critic ? m->ppo->critic : m->ppo->actor, m->num_parts);
    if (!is_critic && !m->ppo->categories) add_log_std(m->ppo, m->num_parts);
}

/* Returns 0 if an action is none of the choices. */
static int run_minibatch(struct minibatch *m) {
    struct ppo *p = m->ppo;
    m->num_parts = num_parts(m->count);
    for (int i = 0; i < 2; i++) atomic_init(m->num_left + i, m->num_parts);
    if (m->goes_forward) p->actor->version++, p->critic->version++;
    run_tasks(2 * m->num_parts, p->num_threads, ppo_task, m);
    if (!m->goes_forward) return 1;
    p->policy_loss = p->value_loss = 0;
    for (int64_t part = 0; part < m->num_parts; part++) {
        if (p->parts[part].is_invalid) return 0;
        p->policy_loss += p->parts[part].policy_loss;
        p->value_loss += p->parts[part].value_loss;
    }
    return 1;
}

/* Compute the losses of a minibatch and what `ppo_backward` needs. log(pi / pi_proximal) of its rows goes to
   `log_ratio`. Returns 0 if an action is none of the choices. */
int64_t ppo_forward(struct ppo *p, const int64_t *rows, int64_t count, float *log_ratio, const float *of_all,
                    int64_t num_all) {
    take_advantages(p, rows, count, of_all, num_all);
    struct minibatch m = {.ppo = p, .rows = rows, .count = count, .log_ratio = log_ratio, .goes_forward = 1};
    return run_minibatch(&m);
}

/* Write the gradients of the minibatch that `ppo_forward` was given last. */
void ppo_backward(struct ppo *p, const int64_t *rows, int64_t count, double entropy_weight) {
    struct minibatch m = {.ppo = p, .rows = rows, .count = count, .entropy_weight = entropy_weight, .goes_backward = 1};
    run_minibatch(&m);
}
