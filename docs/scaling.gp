# Figure of docs/backends.md: speedup over the number of threads, against what the memory or the multiply-add units
# of as many threads allow.
#   gnuplot docs/scaling.gp   writes docs/scaling.svg
set terminal svg size 860,460 font "sans-serif,13" background "#ffffff"
set output "docs/scaling.svg"
results = "bench/results/scaling-intel-xeon-16-cores-2026-11-26.txt" # of bench/scaling.sh
set logscale xy 2
set xlabel "threads"
set ylabel "speedup over one thread"
set key top left
set grid lc rgb "#dddddd"
rows(batch) = "< grep -E '^(gqa|mla) +".batch." ' ".results
plot x with lines lw 2 lc rgb "#999999" title "linear", \
     rows("32q1s4k") using 3:6 with linespoints pt 7 lw 2 lc rgb "#2c7a3f" title "decode, 32 x 4k keys", \
     rows("32q1s4k") using 3:($6 / $9 * 100) with lines dt 2 lw 2 lc rgb "#2c7a3f" title "a read of the same pages", \
     rows("1q1s32k") using 3:6 with linespoints pt 5 lw 2 lc rgb "#3b5b92" title "decode, 1 x 32k keys", \
     rows("q2k") using 3:6 with linespoints pt 9 lw 2 lc rgb "#b3541e" title "prefill, 2k tokens", \
     rows("8q1s4k") using 3:6 with linespoints pt 11 lw 2 lc rgb "#7a2c6e" title "MLA decode, 128 heads, 8 x 4k keys"
