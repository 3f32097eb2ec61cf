{{- /* The pod of a worker: alone, or the leader or a follower of several nodes. Input: root, fleet, w, labels, part. */ -}}
{{- define "rollbus.workerPod" -}}
{{- $root := .root }}
{{- $w := .w }}
{{- $auth := $root.Values.auth }}
{{- $follower := eq .part "follower" }}
{{- $args := list "--nats" "$(ROLLBUS_NATS)" "--fleet" .fleet.name "--engine" $w.engine "--served-model-name" $w.served "--role" $w.role }}
{{- if $w.model }}{{ $args = concat $args (list "--model" $w.model) }}{{ end }}
{{- $engine := deepCopy $w.engineArgs }}
{{- if eq .part "leader" }}{{ $_ := set $engine "distributed_executor_backend" "ray" }}{{ end }}
{{- if $engine }}{{ $args = concat $args (list "--engine-args" (toJson $engine)) }}{{ end }}
{{- if $w.kvTransferConfig }}{{ $args = concat $args (list "--kv-transfer-config" (toJson $w.kvTransferConfig)) }}{{ end }}
{{- if $w.checkpoints }}{{ $args = concat $args (list "--weight-root" "/checkpoints") }}{{ end }}
{{- if $auth.enabled }}{{ $args = concat $args (list "--creds" "/keys/worker.creds") }}{{ else }}{{ $args = concat $args (list "--worker-id" "$(POD_NAME)") }}{{ end }}
{{- $args = concat $args (list "--cache-dir" "/weights" "--probe" "0.0.0.0:8081" "--socket" "/run/rollbus/own/worker.sock" "--start-timeout" (toString $w.startTimeoutS) "--drain-s" (toString $w.drainS) "--on-duplicate" "wait" "--log-format" "json") }}
{{- $args = concat $args $w.extraArgs }}
metadata:
  labels: {{- include "rollbus.selector" .labels | nindent 4 }}
spec:
  {{- include "rollbus.podSecurity" $root | nindent 2 }}
  terminationGracePeriodSeconds: {{ int $w.gracePeriodS }}
  {{- with $w.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $w.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $w.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $w.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $w.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: worker
      image: {{ include "rollbus.image" (dict "root" $root "kind" "worker" "override" $w.image) }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      {{- if $follower }}
      # The engine of the leader uses this pod's GPUs through Ray.
      command: [sh, -c, 'exec ray start --address="$LWS_LEADER_ADDRESS:6379" --block --disable-usage-stats']
      {{- else if eq .part "leader" }}
      command: [sh, -c, 'ray start --head --port=6379 --include-dashboard=false --disable-usage-stats && exec rollbus worker "$@"', worker]
      {{- else }}
      command: [rollbus, worker]
      {{- end }}
      {{- if not $follower }}
      args: {{- toYaml $args | nindent 8 }}
      {{- end }}
      env:
        - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
        {{- include "rollbus.natsEnv" (dict "root" $root) | nindent 8 }}
        - {name: HOME, value: /home/rollbus}
        - {name: TMPDIR, value: /tmp}
        - {name: XDG_CACHE_HOME, value: /cache}
        - {name: HF_HOME, value: /cache/huggingface}
        - {name: VLLM_CACHE_ROOT, value: /cache/vllm}
        - {name: TRITON_CACHE_DIR, value: /cache/triton}
        - {name: TORCHINDUCTOR_CACHE_DIR, value: /cache/inductor}
        - {name: CUDA_CACHE_PATH, value: /cache/cuda}
        - {name: VLLM_NO_USAGE_STATS, value: "1"}
        {{- with $w.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if not $follower }}
      ports:
        - {name: probe, containerPort: 8081}
      # Loading for an hour is alive. The worker itself gives up after --start-timeout.
      startupProbe: {httpGet: {path: /health, port: probe}, periodSeconds: 10, timeoutSeconds: 5, failureThreshold: {{ max 6 (div (add (int $w.startTimeoutS) 9) 10) }}}
      livenessProbe: {httpGet: {path: /health, port: probe}, periodSeconds: 10, timeoutSeconds: 5, failureThreshold: 6}
      readinessProbe: {httpGet: {path: /ready, port: probe}, periodSeconds: 10, timeoutSeconds: 5}
      lifecycle:
        preStop:
          exec:
            command: [rollbus, drain, --socket, /run/rollbus/own/worker.sock, --timeout-s, {{ $w.drainS | quote }}]
      {{- end }}
      resources:
        requests:
          cpu: {{ $w.cpu | quote }}
          memory: {{ $w.memoryMi }}Mi
          {{- if $w.gpus }}
          {{ $w.gpuResource }}: {{ int $w.gpus }}
          {{- end }}
        limits:
          memory: {{ $w.memoryMi }}Mi
          {{- if $w.gpus }}
          {{ $w.gpuResource }}: {{ int $w.gpus }}
          {{- end }}
      {{- include "rollbus.containerSecurity" $root | nindent 6 }}
      volumeMounts:
        - {name: home, mountPath: /home/rollbus}
        - {name: tmp, mountPath: /tmp}
        - {name: cache, mountPath: /cache}
        - {name: weights, mountPath: /weights}
        - {name: run, mountPath: /run/rollbus}
        - {name: shm, mountPath: /dev/shm}
        {{- if $w.models }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- end }}
        {{- if $w.checkpoints }}
        - {name: checkpoints, mountPath: /checkpoints, readOnly: true}
        {{- end }}
        {{- if and $auth.enabled (not $follower) }}
        # Only this pod's key.
        - {name: keys, mountPath: /keys/worker.creds, subPathExpr: $(POD_NAME).creds, readOnly: true}
        {{- end }}
        {{- if $root.Values.tls.caSecret }}
        - {name: tls, mountPath: /tls, readOnly: true}
        {{- end }}
  volumes:
    - {name: home, emptyDir: {sizeLimit: {{ $w.home }}}}
    - {name: tmp, emptyDir: {sizeLimit: {{ $w.tmp }}}}
    - {name: cache, emptyDir: {sizeLimit: {{ $w.cache }}}}
    - {name: run, emptyDir: {medium: Memory, sizeLimit: 16Mi}}
    - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ $w.shm }}}}
    {{- if $w.weightsCache }}
    - name: weights
      {{- toYaml $w.weightsCache | nindent 6 }}
    {{- else }}
    - {name: weights, emptyDir: {sizeLimit: {{ $w.weightsCacheSize }}}}
    {{- end }}
    {{- with $w.models }}
    - name: models
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- with $w.checkpoints }}
    - name: checkpoints
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- if and $auth.enabled (not $follower) }}
    - {name: keys, secret: {secretName: {{ $w.set }}-keys{{ include "rollbus.suffix" $auth.rotation }}, defaultMode: 0400}}
    {{- end }}
    {{- with $root.Values.tls.caSecret }}
    - {name: tls, secret: {secretName: {{ . }}, items: [{key: ca.crt, path: ca.crt}]}}
    {{- end }}
{{- end }}
