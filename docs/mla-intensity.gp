# Figure of docs/mla.md: operations per byte of one decode step against what machines can do.
#   gnuplot docs/mla-intensity.gp   writes docs/mla-intensity.svg
set terminal svg size 860,460 font "sans-serif,13" background "#ffffff"
set output "docs/mla-intensity.svg"
set logscale x 2
set logscale y 10
set xrange [0.5:1024]
set yrange [0.01:2000]
set xlabel "operations for each byte of cache read"
set ylabel "attainable TFLOP/s"
set format y "%g"
set key at graph 0.66, graph 0.62
set grid lc rgb "#dddddd"
roof(x, peak, bandwidth) = x * bandwidth < peak ? x * bandwidth : peak
set arrow 1 from 1, 0.01 to 1, 2000 nohead dt 2 lc rgb "#999999"
set arrow 2 from 8, 0.01 to 8, 2000 nohead dt 2 lc rgb "#999999"
set arrow 3 from 121, 0.01 to 121, 2000 nohead dt 2 lc rgb "#999999"
set arrow 4 from 242, 0.01 to 242, 2000 nohead dt 2 lc rgb "#999999"
set arrow 5 from 484, 0.01 to 484, 2000 nohead dt 2 lc rgb "#999999"
set label 1 "MHA" at 1.05, 1200
set label 2 "GQA 64/8" at 8.4, 1200
set label 3 "MLA-64" at 110, 0.5 rotate by 90
set label 4 "MLA-128" at 220, 0.5 rotate by 90
set label 5 "MLA-128, MTP" at 440, 0.5 rotate by 90
plot roof(x, 989, 4.8) lw 2 lc rgb "#2c7a3f" title "H200: 989 TFLOP/s, 4.8 TB/s", \
     roof(x, 707, 3.2) lw 2 lc rgb "#b3541e" title "Ascend 910: 707 TFLOP/s, 3.2 TB/s", \
     roof(x, 0.166, 0.027) lw 2 lc rgb "#3b5b92" title "2 Zen 3 cores: 0.166 TFLOP/s, 27 GB/s measured"
