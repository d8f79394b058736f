#include "cuda_emulator/wgmma_queue.h"

#include <math.h>
#include <string.h>

namespace
{

bool is_same(const wgmma_product *a, const wgmma_product *b)
{
    return a->columns == b->columns && a->type == b->type && a->is_left_shared == b->is_left_shared &&
           a->is_transposed == b->is_transposed && a->adds == b->adds && a->right == b->right &&
           (!a->is_left_shared || a->left == b->left);
}

/* That of the first lane's registers, with what they hold; other lanes' have to be the same. */
const char *find_sum(wgmma_sum **out, wgmma_queue *queue, size_t step)
{
    const wgmma_product *first = &queue->asked[0][step];
    wgmma_sum *sum = NULL;
    for (const auto &of : queue->sums)
        if (of->d[0] == first->d) sum = of.get();
    if (!sum) {
        sum = queue->sums.emplace_back(std::make_unique<wgmma_sum>()).get();
        sum->columns = first->columns;
        for (int32_t lane = 0; lane < 32; lane++) {
            float *d = sum->d[lane] = queue->asked[lane][step].d;
            for (int32_t i = 0; i < sum->columns / 2; i++) {
                sum->of.of[matrix_row_of(lane, i)][matrix_column_of(lane, i)] = d[i];
                d[i] = NAN;
            }
        }
    }
    for (int32_t lane = 0; lane < 32; lane++)
        if (sum->d[lane] != queue->asked[lane][step].d) return "lanes of a warp ask wgmma for different sums";
    if (sum->columns != first->columns) return "wgmma adds to a sum under way that has another shape";
    sum->num_products++;
    *out = sum;
    return NULL;
}

/* The sum goes back to the registers. */
void settle(wgmma_queue *queue, const wgmma_sum *sum)
{
    for (int32_t lane = 0; lane < 32; lane++)
        for (int32_t i = 0; i < sum->columns / 2; i++)
            sum->d[lane][i] = sum->of.of[matrix_row_of(lane, i)][matrix_column_of(lane, i)];
    std::erase_if(queue->sums, [sum](const auto &of) { return of.get() == sum; });
}

} // namespace

void wgmma_queue_fence(wgmma_queue *queue, int32_t lane) { queue->is_fenced[lane] = true; }

const char *wgmma_queue_ask(wgmma_queue *queue, int32_t lane, const wgmma_product *product)
{
    if (!queue->is_fenced[lane]) return "wgmma without a wgmma.fence behind the last group";
    queue->asked[lane].push_back(*product);
    return NULL;
}

const char *wgmma_queue_commit(wgmma_queue *queue)
{
    const size_t num_steps = queue->asked[0].size();
    std::vector<wgmma_step> group(num_steps);
    const char *fault = NULL;
    for (int32_t lane = 0; lane < 32 && !fault; lane++) {
        queue->is_fenced[lane] = false;
        if (queue->asked[lane].size() != num_steps) fault = "lanes of a warp ask wgmma for different products";
    }
    for (size_t i = 0; i < num_steps && !fault; i++) {
        wgmma_step *step = &group[i];
        step->product = queue->asked[0][i];
        for (int32_t lane = 0; lane < 32 && !fault; lane++) {
            const wgmma_product *of_lane = &queue->asked[lane][i];
            if (!is_same(&step->product, of_lane)) fault = "lanes of a warp ask wgmma for different products";
            memcpy(step->registers[lane], of_lane->registers, sizeof(step->registers[lane]));
        }
        if (!fault) fault = find_sum(&step->sum, queue, i);
    }
    for (auto &asked : queue->asked) asked.clear();
    queue->groups.push_back(std::move(group));
    return fault;
}

const char *wgmma_queue_run(wgmma_queue *queue, const matrix_memory *memory, int32_t warp)
{
    matrix_right right;
    matrix_left left;
    const wgmma_product *loaded = NULL; /* the step whose right operand is there */
    const char *fault = NULL;
    for (const wgmma_step &step : queue->groups.front()) {
        const wgmma_product *product = &step.product;
        if (product->is_left_shared) {
            fault = matrix_load_left(&left, memory, product->type, product->left, warp * MATRIX_ROWS);
        } else {
            for (int32_t lane = 0; lane < 32; lane++) matrix_set_left(&left, product->type, step.registers[lane], lane);
        }
        if (!fault && !(loaded && loaded->right == product->right && loaded->columns == product->columns &&
                        loaded->type == product->type && loaded->is_transposed == product->is_transposed))
            fault = matrix_load_right(&right, memory, product->type, product->right, product->columns,
                                      product->is_transposed);
        if (fault) return fault;
        loaded = product;
        matrix_multiply(&step.sum->of, &left, &right, product->columns, product->adds);
        if (--step.sum->num_products == 0) settle(queue, step.sum);
    }
    queue->groups.pop_front();
    return NULL;
}
