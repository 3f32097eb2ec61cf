{{- define "rollbus.labels" -}}
app.kubernetes.io/name: rollbus
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "rollbus.selector" -}}
app.kubernetes.io/name: rollbus
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
rollbus-fleet: {{ .fleet.name }}
{{- with .set }}
rollbus-workers: {{ . }}
{{- end }}
{{- end }}

{{- /* Image by the name of its value; `override` wins. */ -}}
{{- define "rollbus.image" -}}
{{- $i := .root.Values.image }}
{{- $name := printf "%s:%s" (get $i .kind) (toString $i.tag) }}
{{- .override | default (ternary (printf "%s/%s" $i.registry $name) $name (ne $i.registry "")) }}
{{- end }}

{{- /* A quantity in Mi, rounded up. */ -}}
{{- define "rollbus.mi" -}}
{{- $q := toString . }}
{{- $n := regexFind "^[0-9]+" $q | int64 }}
{{- $unit := regexFind "[A-Za-z]*$" $q }}
{{- if eq $unit "Ki" }}{{ div (add $n 1023) 1024 }}
{{- else if eq $unit "Mi" }}{{ $n }}
{{- else if eq $unit "Gi" }}{{ mul $n 1024 }}
{{- else if eq $unit "Ti" }}{{ mul $n 1048576 }}
{{- else }}{{ fail (printf "the quantity %q is not a whole number with Ki, Mi, Gi or Ti" $q) }}
{{- end }}
{{- end }}

{{- define "rollbus.natsName" -}}
{{- $v := .Values.nats }}
{{- if $v.fullnameOverride }}{{ $v.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else if contains (default "nats" $v.nameOverride) .Release.Name }}{{ .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name (default "nats" $v.nameOverride) | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "rollbus.natsUrl" -}}
{{- if .Values.nats.enabled }}
{{- $name := include "rollbus.natsName" . }}
{{- $cluster := .Values.nats.config.cluster }}
{{- $urls := list }}
{{- range $i := until (ternary (int $cluster.replicas) 1 $cluster.enabled) }}
{{- $urls = append $urls (printf "%s://%s-%d.%s-headless.%s.svc:4222" (ternary "tls" "nats" $.Values.tls.enabled) $name $i $name $.Release.Namespace) }}
{{- end }}
{{- join "," $urls }}
{{- else }}{{ .Values.externalNats.url }}
{{- end }}
{{- end }}

{{- /* Variables of each program that connects to NATS. */ -}}
{{- define "rollbus.natsEnv" -}}
- {name: ROLLBUS_NATS, value: {{ include "rollbus.natsUrl" .root | quote }}}
{{- if .creds }}
- {name: ROLLBUS_CREDS, value: {{ .creds }}}
{{- end }}
{{- if .root.Values.tls.caSecret }}
- {name: ROLLBUS_TLS_CA, value: /tls/ca.crt}
{{- end }}
{{- end }}

{{- define "rollbus.podSecurity" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{- define "rollbus.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- /* Suffix of Secrets and user names of a rotation: none for the first. */ -}}
{{- define "rollbus.suffix" -}}
{{- if gt (int .) 1 }}-k{{ int . }}{{ end }}
{{- end }}

{{- /* All settings of one entry of fleets[].workers, checked. Input: root, fleet, worker. */ -}}
{{- define "rollbus.worker" -}}
{{- $w := mergeOverwrite (deepCopy .root.Values.worker) (deepCopy .worker) }}
{{- $where := printf "fleet %s, workers %s" .fleet.name $w.name }}
{{- $set := printf "%s-%s-%s" .root.Release.Name .fleet.name $w.name }}
{{- $_ := set $w "set" $set }}
{{- if gt (len $set) 45 }}{{ fail (printf "%s: the name %s has %d characters; allowed: 45" $where $set (len $set)) }}{{ end }}
{{- if and (eq $w.engine "vllm") (eq $w.model "") }}{{ fail (printf "%s: model is empty; allowed: a directory or an id of Hugging Face" $where) }}{{ end }}
{{- $_ := set $w "served" ($w.servedModelName | default (base $w.model)) }}
{{- if eq $w.served "." }}{{ fail (printf "%s: servedModelName is empty, and there is no model to name it after" $where) }}{{ end }}
{{- $grace := add (int $w.drainS) (int $w.engineStopS) 15 }}
{{- if not $w.gracePeriodS }}{{ $_ := set $w "gracePeriodS" $grace }}{{ end }}
{{- if lt (int $w.gracePeriodS) (int $grace) }}{{ fail (printf "%s: gracePeriodS is %d; allowed: at least %d (drainS %d + engineStopS %d + 15)" $where (int $w.gracePeriodS) $grace (int $w.drainS) (int $w.engineStopS)) }}{{ end }}
{{- $tp := mul (int (get $w.engineArgs "tensor_parallel_size" | default 1)) (int (get $w.engineArgs "pipeline_parallel_size" | default 1)) (int (get $w.engineArgs "data_parallel_size" | default 1)) }}
{{- $gpus := mul (int $w.gpus) (int $w.nodes) }}
{{- if and (gt $gpus 0) (ne $gpus $tp) }}{{ fail (printf "%s: %d GPUs (gpus %d x nodes %d), but engineArgs use %d (tensor_parallel_size x pipeline_parallel_size x data_parallel_size)" $where $gpus (int $w.gpus) (int $w.nodes) $tp) }}{{ end }}
{{- if and (ne $w.role "both") (not $w.kvTransferConfig) (eq $w.engine "vllm") }}{{ fail (printf "%s: role %s needs kvTransferConfig" $where $w.role) }}{{ end }}
{{- range list "socket" "probe" "drain-s" "on-duplicate" "start-timeout" "worker-id" "creds" "nats" "fleet" "model" "role" "engine" "engine-args" "cache-dir" "served-model-name" }}
{{- $option := printf "--%s" . }}
{{- range $w.extraArgs }}{{ if or (eq . $option) (hasPrefix (printf "%s=" $option) .) }}{{ fail (printf "%s: extraArgs has %s, which the chart sets" $where $option) }}{{ end }}{{ end }}
{{- end }}
{{- with $w.autoscaling }}
{{- if .enabled }}
{{- if lt (int .slots) 1 }}{{ fail (printf "%s: autoscaling.slots is %d; allowed: at least 1, the max_num_seqs of the engine" $where (int .slots)) }}{{ end }}
{{- if and (lt (int .min) 1) (not .allowZero) }}{{ fail (printf "%s: autoscaling.min is 0, so that no worker would serve the model; allowed: at least 1, or allowZero: true" $where) }}{{ end }}
{{- if and (lt (int .min) 1) (eq .kind "hpa") }}{{ fail (printf "%s: autoscaling.min is 0; a HorizontalPodAutoscaler allows at least 1" $where) }}{{ end }}
{{- if lt (int .max) (max 1 (int .min)) }}{{ fail (printf "%s: autoscaling.max is %d, below min %d" $where (int .max) (int .min)) }}{{ end }}
{{- end }}
{{- end }}
{{- $most := ternary (int $w.autoscaling.max) (int $w.replicas) $w.autoscaling.enabled }}
{{- $_ := set $w "keys" (add $most (int .root.Values.auth.spareWorkers)) }}
{{- $_ := set $w "memoryMi" (add (include "rollbus.mi" $w.memory | int64) (include "rollbus.mi" $w.shm | int64) 16) }}
{{- toJson $w }}
{{- end }}
