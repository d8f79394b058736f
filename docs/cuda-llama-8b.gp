# Figure of docs/cuda.md, after figure 9 of the Triton attention paper: a model of Llama-3.1-8B's shape, batch 1, prompt of
# 500 tokens, 12,800 tokens out, on one H200. The points are those of bench/results/generate-llama-8b-*.txt.
#   gnuplot docs/cuda-llama-8b.gp   writes docs/cuda-llama-8b.svg
set terminal svg size 860,400 font "sans-serif,13" background "#ffffff"
set output "docs/cuda-llama-8b.svg"
results = "bench/results/generate-llama-8b-nvidia-h200-2026-11-22.txt"
set xrange [0:13500]
set xlabel "context, tokens"
set yrange [0:6]
set ylabel "ms a token"
set key bottom left
set grid lc rgb "#dddddd"
weights = 15.009e9; token = 131072.0; speed = 4552e6 # bytes, bytes, bytes a ms
bound(context) = (weights + context * token) / speed
rows = "< grep -E '^ +[0-9]+ ' ".results
plot rows using 1:2 with linespoints pt 7 lw 2 lc rgb "#2c7a3f" title "measured; 12,799 tokens in 61.1 s", \
     bound(x) / 0.7 dt 2 lc rgb "#b3541e" title "70% of the bound", \
     bound(x) lw 2 lc rgb "#999999" title "bound: weights and cache at the speed of a pure read"
